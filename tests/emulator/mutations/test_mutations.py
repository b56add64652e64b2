"""Each fault is put into its kernel and must be caught by the check that it names.

The summary at the end of a run prints what detected each: a report of the emulator, or a wrong result.
"""
import contextlib
import io

import pytest

from cupy_dma.backends.cuda.runtime import jit
from tests import emulator
from tests.emulator.mutations import (
    faults_attention,
    faults_decode,
    faults_key_plan,
    faults_lists,
    faults_select,
    faults_sm90,
    faults_sm90_backward,
    faults_sm90_stored,
)
from tests.emulator.mutations.checks import CHECKS, OWN

FAULTS = [*faults_sm90.FAULTS, *faults_sm90_backward.FAULTS, *faults_sm90_stored.FAULTS, *faults_key_plan.FAULTS,
          *faults_attention.FAULTS, *faults_select.FAULTS, *faults_lists.FAULTS, *faults_decode.FAULTS]


@pytest.fixture(autouse=True)
def quiet():
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@pytest.mark.parametrize("name", OWN)
def test_sound_kernels_pass(name):
    """Only the dedicated probes run here; the other checks are tests that run in their own files."""
    OWN[name]()


def test_every_fault_fits_its_kernel():
    texts = {fault.file: (jit.kernels_directory() / fault.file).read_text() for fault in FAULTS}
    assert [fault.name for fault in FAULTS if texts[fault.file].count(fault.old) != 1] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_are_caught(fault, monkeypatch, record_property):
    text = (jit.kernels_directory() / fault.file).read_text()
    assert text.count(fault.old) == 1, "the kernel has changed: adapt the fault"
    original = jit.source_text
    monkeypatch.setattr(jit, "source_text", lambda name: original(name).replace(fault.old, fault.new))
    with emulator.using(), pytest.raises((emulator.EmulatorError, AssertionError)) as caught:
        CHECKS[fault.caught_by]()
    lines = [line.strip() for line in str(caught.value).splitlines() if line.strip()]
    kind = "" if caught.type is emulator.EmulatorError else "wrong result: "
    record_property("fault", fault.name)
    record_property("caught", f"{fault.caught_by}: {kind}{lines[0] if lines else ''}")
