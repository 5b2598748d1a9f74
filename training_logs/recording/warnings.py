"""The warnings of a run, counted by kind, so that one that comes up in every round costs no more than the first."""

import re

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
# Kinds that are kept: so many that came up first, and so many of the others, those that came up last.
KEPT = 100
# Of each kind so many are logged, then every tenth, hundredth, thousandth.
_LOGGED = 10


def kind_of(message: str) -> str:
    """What a message says, whichever round, trainer or node it says it of."""
    return _NUMBER.sub("#", message)


class Warnings:
    """What came up, how often, and what is worth a line in the log.

    Args:
        state: from state_dict, to go on there.
    """

    def __init__(self, state: dict | None = None):
        state = state or {"first": [], "last": [], "left_out": 0}
        self._first = {kind_of(entry["message"]): dict(entry) for entry in state["first"]}
        self._last = {kind_of(entry["message"]): dict(entry) for entry in state["last"]}
        self._left_out: int = state["left_out"]

    def add(self, message: str, once: bool = False) -> bool:
        """Count a warning; whether it should be logged.

        once: one of a kind that came up before is only logged: it is the same one.
        """
        kind = kind_of(message)
        entry = self._first.get(kind)
        if once and (entry or self._last.get(kind)):
            return True
        if entry is None:
            entry = self._last.pop(kind, None) or {"message": message, "count": 0, "last": ""}
            if len(self._first) < KEPT:
                self._first[kind] = entry
            else:
                self._last[kind] = entry
        repeated, entry["last"] = entry["last"] == message, message
        entry["count"] += 1
        if len(self._last) > KEPT:
            self._left_out += self._last.pop(next(iter(self._last)))["count"]
        shown = entry["count"] <= _LOGGED or entry["count"] == 10 ** (len(str(entry["count"])) - 1)
        return shown and not repeated

    def state_dict(self) -> dict:
        """What came up so far, as JSON values."""
        return {
            "first": [dict(entry) for entry in self._first.values()],
            "last": [dict(entry) for entry in self._last.values()],
            "left_out": self._left_out,
        }

    def summary(self) -> list[dict]:
        """By kind: the first message, the last where it is another, and how many there were."""
        found = []
        for entry in [*self._first.values(), *self._last.values()]:
            other = {} if entry["last"] == entry["message"] else {"last": entry["last"]}
            found.append({"message": entry["message"], "count": entry["count"]} | other)
        if self._left_out:
            text = f"warnings of other kinds, between the first {KEPT} kinds and the last {KEPT}"
            found.insert(len(self._first), {"message": text, "count": self._left_out})
        return found
