"""Processes of a process group that are started once and run many small jobs: ``ranks.run(world, job, ...)``.

A job is a function of a module, ``job(group, *arguments)``, that every rank of the group calls; ``group`` has ``world``
ranks. A job may make other groups only if all ``MOST`` ranks run it. Results come back by pickle. ``run`` raises a
job's exception in the test; ``outcomes`` returns it, per rank.
"""
import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MOST = 4
TIMEOUT = 120.0  # seconds for a job


class Ranks:
    """``most`` processes, forked from one that has imported torch. ``backend``: that of torch.distributed; with "nccl"
    each process has a GPU."""

    def __init__(self, most: int = MOST, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "cupy_dma.torch", "tests.distributed.jobs"])
        # A FileStore would be simpler, but takes seconds on busy cores.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes, self.processes = [], []
        for rank in range(most):
            mine, its = context.Pipe()
            arguments = rank, most, backend, its, self.store.port
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            its.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def outcomes(self, world: int, job: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> list[Any]:
        """What the job returned on each rank, or the exception that it raised there. ``timeout``: gives the job a
        process group of its own with this timeout in seconds, which it may break."""
        for pipe in self.pipes:  # all of them, because all must make the group
            pipe.send_bytes(pickle.dumps((world, job, arguments, timeout)))
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT):
                for process in self.processes:  # late answers would be mistaken for the next job's
                    process.kill()
                raise TimeoutError(f"rank {rank} has not finished {job.__name__} within {TIMEOUT} s")
            found.append(pickle.loads(pipe.recv_bytes()))
        return found[:world]

    def run(self, world: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a job and return its result on each rank."""
        found = self.outcomes(world, job, *arguments)
        for rank, result in enumerate(found):
            if isinstance(result, BaseException):
                raise AssertionError(f"rank {rank}: {result!r}\n{getattr(result, 'text', '')}") from result
        return found

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # ends the process
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(rank: int, most: int, backend: str, pipe: Any, port: int) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=most,
                            timeout=timedelta(seconds=TIMEOUT / 2))
    groups = {world: dist.new_group(range(world)) for world in range(1, most + 1)}
    while True:
        try:
            world, job, arguments, timeout = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        group = groups[world]
        try:
            if timeout is not None:
                group = dist.new_group(range(world))
                if rank < world:  # start the timeout now: making the group may take longer
                    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), group)
            torch.manual_seed(0)
            result = job(group, *arguments) if rank < world else None
        except BaseException as error:
            error.text = traceback.format_exc()  # type: ignore[attr-defined]
            result = error
        try:
            message = pickle.dumps(result)
        except Exception:
            message = pickle.dumps(RuntimeError(f"{type(result).__name__}: {result}"))
        pipe.send_bytes(message)
