"""Global variables that code of other modules changes and reads."""

LAZY = {"gain": 1.0}
DEEP = {"gain": 1.0}
