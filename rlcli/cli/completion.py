"""`rlcli completion`: the script that makes a shell complete rlcli's words,
and the candidates that it requests."""

from __future__ import annotations

import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli.arguments import AsJson
from rlcli.cli.output import print_json, print_talk, write_text
from rlcli.errors import ResourceError, UsageError
from rlcli.files import not_writable

if TYPE_CHECKING:
    from rlcli.recipe.introspection.candidate import Candidate

ANSWER = "__complete"
"""The verb that the scripts call: `rlcli __complete zsh train ppo_math tra`, or `… bash LINE`."""

BASH = r"""# bash completion of rlcli
_rlcli() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done < <("${1/#\~/$HOME}" \
        __complete bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
    case "${COMPREPLY[0]}" in
        *[=./]) compopt -o nospace 2>/dev/null ;;
    esac
}
complete -o nosort -F _rlcli rlcli 2>/dev/null || complete -F _rlcli rlcli
"""

ZSH = r"""#compdef rlcli
_rlcli() {
    local value doc
    local -a whole whole_shown open open_shown
    while IFS=$'\t' read -r value doc; do
        if [[ $value == *[=./] ]]; then
            open+=("$value"); open_shown+=("${value}${doc:+  -- $doc}")
        else
            whole+=("$value"); whole_shown+=("${value}${doc:+  -- $doc}")
        fi
    done < <("${words[1]/#\~/$HOME}" \
        __complete zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    (( $#open )) && compadd -V rlcli-open -l -S '' -d open_shown -a open
    (( $#whole )) && compadd -V rlcli -l -d whole_shown -a whole
}
if [[ ${zsh_eval_context[-1]} == loadautofunc ]]; then
    _rlcli "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
    compdef _rlcli rlcli
fi
"""

FISH = r"""# fish completion of rlcli
function __rlcli_complete
    set -l words (commandline -opc)
    $words[1] __complete fish $words[2..] (commandline -ct | string unescape) 2>/dev/null
end
complete -c rlcli -f -k -a '(__rlcli_complete)'
"""


class Shell(StrEnum):
    """Shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


SCRIPTS = {Shell.BASH: BASH, Shell.ZSH: ZSH, Shell.FISH: FISH}


def completion(
    shell: Annotated[
        Shell | None, typer.Argument(metavar="SHELL", help="bash, zsh or fish; default: $SHELL.")
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Write the script where the shell finds it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the script that completes verbs, recipes, keys and values in your shell, or install it.

    Example: source <(rlcli completion bash)
    """
    shell = shell or _current_shell()
    file = _place(shell)
    if install:
        _install(file, SCRIPTS[shell])
    if as_json:
        print_json(
            {
                "shell": shell.value,
                "file": str(file),
                "installed": install,
                "script": SCRIPTS[shell],
            }
        )
    elif install:
        print_talk(f"wrote {file}\n{_next_step(shell, file)}")
    else:
        write_text(SCRIPTS[shell])


def _current_shell() -> Shell:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in list(Shell):
        raise UsageError(
            "which shell?" if not name else f"no completion for the shell {name}",
            hint="rlcli completion bash, zsh or fish",
        )
    return Shell(name)


def _place(shell: Shell) -> Path:
    """The path where a shell looks for a user's completions."""
    try:
        data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    except RuntimeError as error:
        raise ResourceError(
            "there is no home directory", hint="set HOME, or XDG_DATA_HOME"
        ) from error
    return {
        Shell.BASH: data / "bash-completion/completions/rlcli",
        Shell.ZSH: data / "zsh/site-functions/_rlcli",
        Shell.FISH: config / "fish/completions/rlcli.fish",
    }[shell]


def _install(file: Path, script: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script, encoding="utf-8")
    except OSError as error:
        raise not_writable(file, error) from None


def _next_step(shell: Shell, file: Path) -> str:
    if shell is Shell.BASH:
        return (
            "New shells complete rlcli. Without the package bash-completion, add to "
            f"~/.bashrc:\n  source {file}"
        )
    if shell is Shell.ZSH:
        return (
            "Add to ~/.zshrc, before compinit, unless it is already there:\n"
            f"  fpath=({file.parent} $fpath)"
        )
    return "New shells complete rlcli."


# -- the candidates --------------------------------------------------------------------------------


def answer(app: Any, arguments: list[str]) -> None:
    """Print the candidates, one per line, in the format of the shell's script."""
    from rlcli.cli.candidates import candidates

    shell, *words = arguments or [""]
    if shell != Shell.BASH:
        for candidate in candidates(app, words):
            _say(f"{candidate.text}\t{_short(candidate.doc)}" if candidate.doc else candidate.text)
        return
    line, breaks = (*words, "", "")[:2]
    words, quote = split_line(line)
    offered = candidates(app, words[1:] or [""])
    for candidate in offered:
        _say(_for_bash(candidate, words[-1], quote, breaks))


def _short(doc: str) -> str:
    return doc.partition("\n")[0].partition("; ")[0][:70]


def _for_bash(candidate: Candidate, last: str, quote: str, breaks: str) -> str:
    """The part of a word that readline replaces: the text after its last word break,
    such as `=` or `:`."""
    start = (
        0 if quote else max((last.rfind(sign) + 1 for sign in "=:" if sign in breaks), default=0)
    )
    text = candidate.text[start:]
    if quote:
        return text
    return "".join(f"\\{sign}" if sign in " \\'\"$`!&;<>()|*?[]{}#" else sign for sign in text)


def split_line(line: str) -> tuple[list[str], str]:
    """(the words of an unfinished command line, the quote that is open at its end)."""
    end = "\0"  # no shell passes it on; it makes the word being typed the last one, empty or not
    lexer = shlex.shlex(line + end, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    quote = ""
    try:
        words += lexer
    except ValueError:  # a quote is open
        words.append(lexer.token)
        quote = str(vars(lexer)["state"])  # its type stub lacks it
    return [*words[:-1], words[-1].removesuffix(end)], quote


def _say(text: str) -> None:
    if text.isprintable() or text.replace("\t", "").isprintable():
        sys.stdout.write(text + "\n")
