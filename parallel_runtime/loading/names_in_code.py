"""Which variables and attributes a function's code names, or reads by names that it computes."""

from __future__ import annotations

import dis
import sys
from functools import cache
from types import CodeType

from .code_names import source_code

UNSEEN = {"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"}
BY_NAME = {  # a letter for each step of code that loads one of these: capital where it reads variables by name
    "getattr": "G", "hasattr": "G", "attrgetter": "A", "globals": "B", "vars": "V", "__dict__": "D", "eval": "E",
    "exec": "E", "getmembers": "E", "self": "s", "get": "g",
}  # fmt: skip
BY_TEXT = {"__dict__", "attrgetter", "getattr", "globals", "hasattr", "vars"}  # what takes names as strings


@cache
def code_names(code: CodeType) -> frozenset[str]:
    """Returns the names of global variables and attributes in this code and in functions that it defines."""
    inner = (code_names(part) for part in code.co_consts if isinstance(part, CodeType))
    texts = code.co_consts if BY_TEXT.intersection(code.co_names) else ()
    return frozenset(code.co_names).union(*inner, (text for text in texts if isinstance(text, str)))


@cache
def read_by_computed_names(code: CodeType) -> frozenset[str]:
    """Returns the (dotted) names of what this code, or a function that it defines, reads by other names than texts in
    it: "" for its own module."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in UNSEEN]
    letters, found = "".join(map(_letter, steps)), set()
    for place, letter in enumerate(letters):
        if letter.isupper() and not _reads_by_a_text(letters, place):
            first = place + 1
            if letter == "D":
                first = len(letters[:place].rstrip("a")) - 1
            last = first + 1
            while letters[last : last + 1] == "a":
                last += 1
            found.add("" if letter in "BE" else ".".join(str(step.argval) for step in steps[first:last]))
    inner = (read_by_computed_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(found).union(*inner)


def _reads_by_a_text(steps: str, place: int) -> bool:
    """Is what is read there named by a text in the code (t)? Other steps are a: an attribute, l: another load, c: a
    call, b: `[]`. What `self` has is compared anyway."""
    reads, after = steps[place], steps[place + 1 :]
    if (reads == "V" and after.startswith("sc")) or (reads == "D" and steps[:place].endswith("s")):
        return True
    after = after.lstrip({"G": "lsa", "V": "la"}.get(reads, ""))
    if reads in "VB" and after.startswith("c"):  # then `[TEXT]` or `.get(TEXT)`
        after = after[1:].removeprefix("g")
    after = after.removeprefix("g") if reads == "D" else after
    ends = after[1:2] in ("b", "c") or (after[1:2] in ("l", "t", "o", "s") and after[2:3] == "c")
    return reads != "E" and after.startswith("t") and ends


def _letter(step: dis.Instruction) -> str:
    if step.opname == "LOAD_CONST":
        return "t" if isinstance(step.argval, str) else "o"
    if step.opname.startswith("LOAD_"):
        return BY_NAME.get(str(step.argval), "a" if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else "l")
    return "c" if step.opname.startswith("CALL") else "b" if step.opname == "BINARY_SUBSCR" else "o"


@cache
def names_set(module: str) -> frozenset[str]:
    """Returns the names that a module has once it is imported: a node may delete one."""
    steps = [step for code in source_code(sys.modules[module]) for step in dis.get_instructions(code)]
    stored, deleted = ({step.argval for step in steps if step.opname == name} for name in ("STORE_NAME", "DELETE_NAME"))
    return frozenset(stored - deleted)
