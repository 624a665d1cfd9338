"""What goes with what: a table of rules between traits, and one function that refuses.

A *trait* is a word for something that a run has: a topology ("servers"), a property of its strategy ("rounds"), an
option that was set ("record"). `job.traits` reads them from a job and its members, which declare them by their own
attributes. The rules are in `traits.txt`, one per line, between traits alone: no rule knows a member, and a member
that declares its traits needs no line. This module imports nothing that computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gradstream.errors import ConfigError

Traits = Mapping[str, str]
"""Traits, each with the words by which the user has asked for it: {"record": "record=True"}."""

STRATEGY = "strategy"
"""A trait of every run whose strategy is known; its text names the strategy."""
TABLE = Path(__file__).with_suffix(".txt")
VERBS = ("forbids", "needs", "without")


class Rule(NamedTuple):
    """One line of the table.

    Args:
        who: traits that occur together.
        verb: one of VERBS; `traits.txt` says what they mean.
        other: a trait.
        why: the reason, a clause.
        remedy: what to do instead, a clause; "" if the reason says so.
    """

    who: tuple[str, ...]
    verb: str
    other: str
    why: str
    remedy: str

    def is_broken_by(self, traits: Traits) -> bool:
        """Whether these traits break the rule. What a strategy lacks is known only if the strategy is."""
        if not all(trait in traits for trait in self.who):
            return False
        return (
            self.other in traits
            if self.verb == "forbids"
            else STRATEGY in traits and self.other not in traits
        )

    def text(self, traits: Traits) -> str:
        """The message: what was asked for, what it conflicts with, why, and what to do instead."""
        first, *others = (traits[trait] for trait in self.who)
        if self.verb == "without":
            return f"{first} without {self.other}: {self.reason(traits)}"
        others.append(traits[STRATEGY if self.verb == "needs" else self.other])
        beside = " and ".join(dict.fromkeys(text for text in others if text != first))
        return f"{first}{beside and f' with {beside}'}: {self.reason(traits)}"

    def reason(self, traits: Traits) -> str:
        """Why, and what to do instead."""
        return "; ".join(part.format_map(traits) for part in (self.why, self.remedy) if part)


@cache
def rules() -> tuple[Rule, ...]:
    """The table."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return tuple(_rule(line) for line in lines if line and not line.startswith("#"))


def _rule(line: str) -> Rule:
    between, why, *remedy = line.split(" | ")
    verb = next(verb for verb in VERBS if f" {verb} " in between)
    who, _, other = between.partition(f" {verb} ")
    return Rule(tuple(who.split(" & ")), verb, other, why, *(remedy or [""]))


def conflicts(traits: Traits) -> Iterator[Rule]:
    """The rules that these traits break, in the order of the table."""
    return (rule for rule in rules() if rule.is_broken_by(traits))


def refuse(traits: Traits, where: str = "") -> None:
    """Refuses traits that exclude each other.

    Args:
        traits: all that are known.
        where: how the message begins, such as "phases[1]: ".

    Raises:
        ConfigError: two traits exclude each other; the message names both, with the reason and the remedy.
    """
    for rule in conflicts(traits):
        raise ConfigError(where + rule.text(traits))


def obstacle(asked: str, traits: Traits) -> str:
    """Why a run cannot do something for which there is no option, with the remedy; "" if it can.

    Args:
        asked: a trait, such as "resharding".
        traits: the traits of the run.
    """
    whole = {asked: asked, **traits}
    return next((rule.reason(whole) for rule in conflicts(whole) if rule.who[0] == asked), "")
