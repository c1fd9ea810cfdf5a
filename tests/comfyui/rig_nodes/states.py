"""Global variables that code of other modules changes and reads."""

LAZY = {"gain": 1.0}
DEEP = {"gain": 1.0}
LEVEL_HIGH = 1.0
GONE = 0.5


def level() -> float:
    return float(globals()["_".join(("LEVEL", "high".upper()))])


def gone() -> float:
    return float(globals().get("GONE", 0.9))
