"""Processes that are the ranks of a gloo group on this machine: a pool that runs functions, one group a call."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

SECONDS = 60  # a rank whose peers are gone gives up after this


class Died(Exception):
    """A rank ended without an answer."""


def _serve(pipe: Connection, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        function, args, world, meeting, seconds = job
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=seconds),
            )
            try:
                answer = True, function(rank, *args)
            finally:
                dist.destroy_process_group()
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


def _start(rank: int) -> tuple[Connection, SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
    process.start()
    theirs.close()
    return ours, process


class Ranks:
    """Up to ``size`` processes, started when first needed and kept for the next call."""

    def __init__(self, size: int) -> None:
        started = [_start(rank) for rank in range(size)]
        self.pipes = [pipe for pipe, _ in started]
        self.processes = [process for _, process in started]

    def restart(self, rank: int) -> None:
        """Another process in place of one that died."""
        self.processes[rank].join(10)
        self.pipes[rank].close()
        self.pipes[rank], self.processes[rank] = _start(rank)

    def run(self, function: Callable[..., Any], *args: Any, world: int = 3, seconds: float = SECONDS) -> list[Any]:
        """``function(rank, *args)`` on each rank; what each returned, ``Died`` where a rank ended. Errors fail."""
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self.pipes[:world]:
                pipe.send((function, args, world, Path(folder) / "meeting", seconds))
            answers: list[Any] = []
            failed = []
            for rank, pipe in enumerate(self.pipes[:world]):
                try:
                    sound, answer = pipe.recv()
                except EOFError:
                    sound, answer = True, Died(rank)
                if not sound:
                    failed.append(f"rank {rank}:\n{answer}")
                answers.append(answer)
        assert not failed, "\n".join(failed)
        return answers

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
