"""Check that all ranks make the same call, and name the rank that does not.

A *signature* lists by argument what ranks must agree on: sizes, types, options, which gradients are wanted, but not
lengths. A call with a new signature compares it over the process group's key-value store before anything is sent, so
all ranks learn which rank has other arguments, has invalid arguments or is missing. On GPUs a signature that has been
agreed on is not compared again, unless ``CUPY_DMA_CHECK=1``: a warm call does no host work for it. In host memory every
call compares a digest, by an all-gather of 8 bytes, and reads the store only if digests differ.

If a rank fails or stays away during a collective, the others wait until the group's timeout. In host memory the error
then names the missing ranks; on GPUs it is NCCL's.
"""
from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cupy_dma import checks

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
GRACE = 2.0  # seconds that other ranks get to report that they have also timed out


class RankError(RuntimeError):
    """The ranks of a process group do not make the same call: one has failed, is missing, or has other arguments."""


class _Group:
    """State of a process group, kept as long as the group."""

    def __init__(self, group: Any, device: torch.device):
        self.agreed: set[str] = set()
        self.calls = 0  # that have been compared over the store, the same number on all ranks
        self.stages = 0  # collectives that have been started
        self.store = group.get_group_store()
        self.timeout: timedelta = group._get_backend(device).options._timeout


_known: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()


class Agreement:
    """One call on one rank of a group, on a device: its comparison with the others and its collectives."""

    def __init__(self, name: str, group: Any, device: torch.device):
        self.name, self.group, self.device = name, group, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.known: _Group = _known.get(group) or _known.setdefault(group, _Group(group, device))

    # ---- before anything is sent ------------------------------------------------------------------------------------

    def check(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Compare the signature that ``make`` returns. An error of ``make`` is raised here and, as a ``RankError`` that
        names this rank, on all other ranks that compare."""
        try:
            found = {"function": self.name, **make()}
            signature, failure = json.dumps({name: str(x) for name, x in found.items()}), None
        except Exception as error:
            signature, failure = json.dumps({"error": f"{type(error).__name__}: {error}"}), error
        if self.world > 1 and not self._is_agreed(signature, failure):
            self._compare(signature, failure)
        if failure is not None:
            raise failure
        self.known.agreed.add(signature)

    def _is_agreed(self, signature: str, failure: Exception | None) -> bool:
        if self.device.type != "cpu":
            return failure is None and signature in self.known.agreed and not checks.wants_values_checked()
        digest = int.from_bytes(hashlib.blake2b(signature.encode(), digest_size=7).digest(), "big")
        mine = torch.tensor([digest if failure is None else -1 - self.rank])
        every = mine.new_empty(self.world)
        self.wait(self.started(all_gather, every, mine, group=self.group))
        return bool((every == digest).all())

    def _compare(self, signature: str, failure: Exception | None) -> None:
        """Compare the signature through the store."""
        prefix = f"cupy_dma/{self.known.calls}"
        self.known.calls += 1
        self.known.store.set(f"{prefix}/{self.rank}", signature)
        given, missing = self._collected(prefix, self.known.timeout)
        if failure is not None:
            raise failure
        if missing:
            raise RankError(f"{self.name}: {_ranks(missing)} did not make this call within {self._patience()}: failed "
                            f"elsewhere, or repeats an earlier call while this rank's arguments are new")
        for rank, other in enumerate(given):
            if "error" in other:
                raise RankError(f"{self.name}: rank {rank} failed: {other['error']}")
        first = given[0]
        for name in first:
            for rank, other in enumerate(given):
                if other.get(name) != first[name]:
                    raise RankError(f"{self.name}: all ranks must be called with the same {name}, but rank {rank} got "
                                    f"{other.get(name)} and rank 0 got {first[name]}")

    def _collected(self, prefix: str, timeout: timedelta) -> tuple[list[dict[str, str]], list[int]]:
        """The signatures of all ranks, empty for those that did not write one in time; and which ranks these are."""
        deadline, given, missing = time.monotonic() + timeout.total_seconds(), [], []
        for rank in range(self.world):
            left = max(deadline - time.monotonic(), 0.01)
            try:
                self.known.store.wait([f"{prefix}/{rank}"], timedelta(seconds=left))
                given.append(json.loads(self.known.store.get(f"{prefix}/{rank}")))
            except (RuntimeError, dist.DistError):
                given.append({})
                missing.append(rank)
        return given, missing

    # ---- collectives ------------------------------------------------------------------------------------------------

    def started(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Start a collective; returns its work handle."""
        self.known.stages += 1
        try:
            return collective(*arguments, async_op=True, **options)
        except RuntimeError as error:
            raise self._explained(error) from error

    def wait(self, work: Any) -> None:
        """Wait for a collective: the host in host memory, the current stream on a GPU."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._explained(error) from error

    def _explained(self, error: RuntimeError) -> RankError:
        """Name the ranks that have not reached this collective."""
        prefix = f"cupy_dma/stage/{self.known.stages}"
        self.known.store.set(f"{prefix}/{self.rank}", "{}")
        _, missing = self._collected(prefix, timedelta(seconds=GRACE))
        who = f"{_ranks(missing)} did not come to this exchange within {self._patience()}" if missing else \
            "the exchange failed"
        return RankError(f"{self.name}: {who}: {error}")

    def _patience(self) -> str:
        return f"the group's timeout of {self.known.timeout.total_seconds():g} s"


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
