"""The law that every argument matters: some value of it changes a result, alone or together with
a change of another argument, or it is declared to have no effect on numbers, and then it has none.

A setting that is read and then ignored is the commonest bug of training libraries, and no check of
one particular algorithm can know it. What is compared here are results alone: whatever a component
returns, learns, keeps as state or refuses.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain, combinations, islice, zip_longest
from types import MappingProxyType
from typing import Any

from rlcli.api.limits import Needs
from rlcli.errors import RlcliError
from rlcli.testing.arguments import Changes, VariedArgument, described, silent_arguments
from rlcli.testing.contract import Violation, place_of

MOST_VALUES = 5
"""Of an argument, tried beside each change of another one."""


class Deferred:
    """A result that is computed when it is compared, unless an earlier one differs already."""

    def __init__(self, compute: Callable[[], Any]):
        self._compute = compute

    @cached_property
    def outcome(self) -> Any:
        """A text: what was refused."""
        try:
            return self._compute()
        except RlcliError as refusal:
            return refusal.what


class Effects:
    """Results of a component with other arguments, each computed once."""

    def __init__(
        self,
        arguments: Sequence[VariedArgument],
        needs: Needs,
        accepts: Callable[[Changes], bool],
        result: Callable[[Changes], Any],
        differ: Callable[[Any, Any], bool],
    ):
        """`accepts`: whether the component can be made with these changes; `result`: what it then
        does; `differ`: whether two results differ by more than rounding."""
        self._arguments = arguments
        self._named = {argument.name: argument for argument in reversed(arguments)}
        self._needs = needs
        self._accepts = accepts
        self._of = remembered(result)
        self._differ = differ

    def compared_by(self, differ: Callable[[Any, Any], bool]) -> Effects:
        """The same results, of which `differ` says whether two differ."""
        copied = copy.copy(self)
        copied._differ = differ
        return copied

    def without(self, silent: Sequence[str]) -> Iterator[tuple[VariedArgument, Sequence[Any]]]:
        """The arguments without an effect, and the values that give equal results; `silent`: those
        that are not tried."""
        for argument in self._arguments:
            if argument.name not in silent and argument.others:
                for values in self._unlike(argument):
                    if not self._matters(argument, values):
                        yield argument, values

    def ignored(self, silent: Sequence[str]) -> Iterator[tuple[VariedArgument, Changes]]:
        """The arguments that are off by default and do nothing when they are set, or the same
        whatever they are set to, with the choice of another one beside which that is so; not those
        that others need, and go with."""
        needed = {need.partition("=")[0] for need in self._needs.values()}
        for argument in self._arguments:
            if argument.default or argument.name in needed or argument.name in silent:
                continue
            when_set = tuple(filter(None, argument.others))
            values = when_set if len(when_set) > 1 else (argument.default, *when_set)
            for beside in ({}, *self._choices_beside(argument.name)):
                differing = self._differing(beside, argument, values)
                if differing == ():
                    yield argument, beside
                elif differing:  # most likely to differ with the next choice, too
                    apart = [changes[argument.name] for changes in differing]
                    values = tuple(dict.fromkeys((*apart, *values)))

    def _choices_beside(self, name: str) -> Iterator[Changes]:
        """Each other choice of another argument that is accepted alone, and does not have all calls
        refuse what they are given."""
        for argument in self._arguments:
            is_flag = isinstance(argument.default, bool)
            if argument.name != name and argument.is_choice and not is_flag:
                for changes in self._each(argument):
                    if len(changes) == 1 and not _is_refusal(self._of(changes)):
                        yield changes

    def with_effect(self, silent: Sequence[str]) -> Iterator[tuple[VariedArgument, Sequence[Any]]]:
        """Those of the arguments `silent` that change results, and two values that show it; of a
        text, an empty folder is one."""
        for argument in (self._named[name] for name in silent):
            with tempfile.TemporaryDirectory() as folder:
                others = (folder,) if argument.may_be_text else argument.others[:1]
                values = (argument.default, *others)
                if self._differing({}, argument, values):
                    yield argument, values

    def variants(self, silent: Sequence[str]) -> Iterator[Changes]:
        """Each other value of a flag or choice that is accepted, with what it needs, and with the
        first value of another argument without which it would change no result; not so those of the
        arguments `silent`."""
        for argument in self._arguments:
            if argument.is_choice:
                for changes in self._each(argument):
                    is_silent = argument.name in silent
                    yield changes if is_silent else self._beside_others(argument, changes)

    def switched_on(self, silent: Sequence[str]) -> Iterator[Changes]:
        """A value of each number that is off by default, with what it needs; but for the arguments
        `silent`."""
        for argument in self._arguments:
            if not (argument.is_choice or argument.default or argument.name in silent):
                is_on = (changes for changes in self._each(argument) if changes[argument.name])
                yield from islice(is_on, 1)

    def _beside_others(self, argument: VariedArgument, changes: Changes) -> Changes:
        """These changes of an argument, with the first context in which they change a result."""
        values = (argument.default, changes[argument.name])
        for context in self._contexts(argument.name):
            if differing := self._differing(context, argument, values):
                return differing[1]
        return changes

    def of_each_argument(self) -> Iterator[Changes]:
        """Another value of each argument that has one and is accepted."""
        for argument in self._arguments:
            yield from islice(self._each(argument), 1)

    def _each(self, argument: VariedArgument) -> Iterator[Changes]:
        """Each other value of an argument that is accepted, with what it needs."""
        changes = (self._with_needs({}, argument.name, value) for value in argument.others)
        return filter(self._accepts, changes)

    def _unlike(self, argument: VariedArgument) -> list[tuple[Any, ...]]:
        """Values among which some result must differ: of choices any two, of numbers all."""
        values = (argument.default, *argument.others)
        return list(combinations(values, 2)) if argument.is_choice else [values]

    def _matters(self, argument: VariedArgument, values: Sequence[Any]) -> bool:
        """Whether two of these values give different results: with the defaults of other arguments,
        or with another value of one of them. True if no two of them are accepted."""
        is_tried = False
        for context in self._contexts(argument.name):
            tried = values[:MOST_VALUES] if context else values
            differing = self._differing(context, argument, tried)
            if differing:
                return True
            is_tried = is_tried or differing is not None
        return not is_tried

    def _differing(
        self, context: Changes, argument: VariedArgument, values: Sequence[Any]
    ) -> tuple[Changes, ...] | None:
        """Changes with two of these values that give different results beside other changes; empty
        if there are none, and None if no two of them are accepted there."""
        differing = None
        for pair in self._pairs(context, argument, values):
            if self._differ(*map(self._of, pair)):
                return pair
            differing = ()
        return differing

    def _contexts(self, name: str) -> Iterator[Changes]:
        """No other change, then one of another argument; those with a similar name come first, on
        which it most often depends."""
        yield {}
        family = name.partition("_")[0]
        rest = [argument for argument in self._arguments if argument.name != name]
        neighbours = sorted(rest, key=lambda argument: not argument.name.startswith(family))
        first_two = [islice(self._each(argument), 2) for argument in neighbours]
        yield from filter(None, chain.from_iterable(zip_longest(*first_two)))

    def _pairs(
        self, context: Changes, argument: VariedArgument, values: Sequence[Any]
    ) -> Iterator[tuple[Changes, Changes]]:
        """Changes with the first value that is accepted and with each further one, which differ in
        nothing else unless what one value needs is refused with the other."""
        first = None
        for value in values:
            changes = self._with_needs(context, argument.name, value)
            if self._accepts(changes):
                first = first or changes
                shared = {**first, **changes}
                alike = {**shared, argument.name: first[argument.name]}
                if changes is not first:
                    yield (alike, shared) if self._accepts(alike) else (first, changes)

    def _with_needs(self, changes: Changes, name: str, value: Any) -> Changes:
        """These changes, with the argument at a value and what it needs there."""
        merged = {**changes, name: value}
        for condition, need in self._needs.items():
            argument, _, values = condition.partition("=")
            if argument == name and (not values or str(value) in values.split("|")):
                needed, _, allowed = need.partition("=")
                if needed not in merged and needed in self._named:
                    fitting = self._fitting(self._named[needed], allowed)
                    merged |= self._with_needs(merged, needed, fitting)
        return merged

    def _fitting(self, argument: VariedArgument, allowed: str) -> Any:
        """A value that a need names, or else one that counts as set."""
        values = (argument.default, *argument.others)
        names = allowed.split("|")
        return next((v for v in values if (str(v) in names if allowed else v)), argument.default)


def remembered(
    result: Callable[[Changes], Any], defaults: Changes = MappingProxyType({})
) -> Callable[[Changes], Any]:
    """The same, which computes a result once for all changes that come to the same arguments."""
    results: dict[str, Any] = {}

    def of(changes: Changes) -> Any:
        key = repr(sorted({**defaults, **changes}.items()))
        if key not in results:
            results[key] = result(changes)
        return results[key]

    return of


def _is_refusal(results: Any) -> bool:
    """Whether none of several results is more than a message."""
    if not isinstance(results, list):
        return False
    outcomes = (result.outcome if isinstance(result, Deferred) else result for result in results)
    return all(isinstance(outcome, str | None) for outcome in outcomes)


def demand_effects(effects: Effects, cls: type, silent: Sequence[str] | None = None) -> None:
    """Raises Violation for an argument without an effect, and for one that has an effect although
    the class declares that it has none (`silent`)."""
    silent = silent_arguments(cls) if silent is None else silent
    for argument, values in effects.without(silent):
        tried = " and ".join(map(repr, values)) if argument.is_choice else "whatever it is"
        raise Violation(
            f"{argument.name} has no effect: results are the same with {tried}",
            "use it; or name it in NO_EFFECT_ON_NUMBERS, if it is about speed or patience",
            place_of(cls),
        )
    for argument, others in effects.ignored(silent):
        conditions = f"with {described(others)}" if others else "by itself"
        raise Violation(
            f"{argument.name} has no effect {conditions}: results are the same whatever it is",
            "use it there too, or refuse it, by a condition in NEEDS",
            place_of(cls),
        )
    for argument, values in effects.with_effect(silent):
        raise Violation(
            f"results differ between {argument.name} {values[0]!r} and {values[1]!r}, though "
            "NO_EFFECT_ON_NUMBERS names it",
            "take it out of there, or leave numbers alone",
            place_of(cls),
        )
