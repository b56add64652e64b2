"""Mutation tests: faults are put into the kernels one at a time, and the emulator tests must detect each.

    checks.py                 what catches them: tests of tests/emulator/tests, and probes of their own
    faults_sm90.py            faults by the kernel they break: the Hopper forward,
    faults_sm90_backward.py   the Hopper key gradients,
    faults_sm90_stored.py     the Hopper query gradient from stored dS,
    faults_key_plan.py        the plan of the Hopper key gradients by lifetime,
    faults_attention.py       the portable attention kernels,
    faults_select.py          scores and selection,
    faults_lists.py           key lists,
    faults_decode.py          decoding
    test_mutations.py         puts them in
    generated.py              mutants made mechanically; test_generated.py runs them
"""
import re
from typing import NamedTuple


class Fault(NamedTuple):
    """An exact replacement in one kernel file."""

    name: str
    file: str
    old: str
    new: str
    caught_by: str  # a key of ``checks.CHECKS``


def fault(name: str, file: str, edit: str, caught_by: str) -> Fault:
    """The fault of an edit: the kernel's text with one place marked, as «what goes» or as «what goes→what comes»."""
    before, gone, comes, after = re.fullmatch("(.*)«(.*?)(?:→(.*))?»(.*)", edit, re.DOTALL).groups("")
    return Fault(name, file, before + gone + after, before + comes + after, caught_by)
