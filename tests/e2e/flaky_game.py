"""A project with a game that half of its rows cannot play, and a tokenizer whose chat template
rewrites earlier turns."""

from pathlib import Path

NAME = "zz_flaky"
FORGETFUL = "forgetful"
"""The folder of the tokenizer."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{{ message.content if loop.last or message.role == 'user' else 'forgotten' }}"
    "{{ eos_token if message.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SOURCE = '''
import time
from dataclasses import dataclass

from rlcli.api.environment import EnvironmentFailure, Observation, register_environment
from rlcli.interfaces.environments.guess import Guess


@dataclass(kw_only=True)
class Flaky(Guess):
    """The game `guess`; half of its rows fail, and always."""

    pause: float = 0.0
    """Seconds that a turn takes."""
    prize: float = 0.0
    """If it is not 0, the first turn wins so much, whatever it says."""

    def reset(self, row, seed):
        self._fails = seed % 2 == 0
        return super().reset(row, seed)

    def step(self, action):
        if self._fails:
            raise EnvironmentFailure("no server")
        if self.prize:
            return Observation("won", reward=self.prize, done=True)
        time.sleep(self.pause)
        return super().step(action)


register_environment("zz_flaky", Flaky)
'''


def make_flaky_project(folder: Path) -> None:
    """Make a folder the project of a user who has written the game, with the tokenizer."""
    from rlcli.datasets.arithmetic import Arithmetic

    write_environment(folder, NAME, SOURCE)
    tokenizer = Arithmetic.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / FORGETFUL)


def write_environment(folder: Path, name: str, source: str) -> None:
    """Make a folder the project of a user who has written an environment."""
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    environments = folder / "interfaces" / "environments"
    environments.mkdir(parents=True)
    (environments / f"{name}.py").write_text(source)
