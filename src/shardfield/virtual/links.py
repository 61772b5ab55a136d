"""Messages between processes that each run virtual ranks: one thread sends, one per other process receives.

Process p of R, with V virtual ranks each, has the global ranks p * V to p * V + V - 1. A message is a header and
tensors. Messages from one process arrive in the order in which they were sent. Each belongs to one run; those of a run
that failed are dropped.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WorldError

TIMEOUT = 1800.0  # seconds in which some message must arrive while all ranks wait
LIFETIME = timedelta(days=20)  # a receiving thread waits as long as the program computes


class Links:
    """The connections of this process to the others of `group`, a gloo group."""

    def __init__(self, group: dist.ProcessGroup, ranks_each: int):
        self.process, self.processes, self.ranks_each = group.rank(), group.size(), ranks_each
        own = dist.new_group(dist.get_process_group_ranks(group), timeout=LIFETIME, backend="gloo")
        self._group: Any = own  # its methods are called: torch.distributed's functions would look at a rank's state
        self._inbox: deque[Any] = deque()
        self._arrival = threading.Condition()
        self._arrived = time.monotonic()
        self._outbox: queue.Queue[Any] = queue.Queue()
        self._later: list[Any] = []  # messages of the next run
        self.run = 0
        self.failed = ""  # what another process reported of this run
        self._ended: dict[int, str] = {}
        self._threads = [threading.Thread(target=self._send_all, name="virtual-send", daemon=True)]
        for peer in set(range(self.processes)) - {self.process}:
            name = f"virtual-receive-{peer}"
            self._threads.append(threading.Thread(target=self._receive_all, args=(peer,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def process_of(self, rank: int) -> int:
        """Return the process of a global rank."""
        return rank // self.ranks_each

    def is_here(self, rank: int) -> bool:
        """Return whether a global rank is in this process."""
        return self.process_of(rank) == self.process

    def send(self, process: int, header: Any, tensors: Sequence[Tensor] = ()) -> None:
        """Start to send a message; nothing if it is to this process."""
        if process != self.process:
            self._outbox.put((process, (self.run, header), list(tensors)))

    def received(self) -> Iterator[tuple[Any, list[Tensor]]]:
        """Yield the messages of this run that have arrived."""
        while self._inbox:
            yield from self._take(self._inbox.popleft())

    def wait(self, seconds: float = 0.05) -> bool:
        """Wait a while for a message. Return False if none can come, since all other processes have ended this run."""
        with self._arrival:
            if self._arrival.wait_for(lambda: self._inbox, seconds):
                return True
        if time.monotonic() - self._arrived > TIMEOUT:
            raise WorldError(f"all virtual ranks wait, and no message of another process has come for {TIMEOUT:.0f} s")
        return len(self._ended) < self.processes - 1

    def _arrive(self, message: tuple[int, Any, list[Tensor]]) -> None:
        with self._arrival:
            self._inbox.append(message)
            self._arrived = time.monotonic()
            self._arrival.notify_all()

    def _take(self, message: tuple[int, Any, list[Tensor]]) -> Iterator[tuple[Any, list[Tensor]]]:
        peer, (run, header), tensors = message
        if header[0] == "lost":
            self.failed = self.failed or f"the connection to process {peer} was lost: {header[1]}"
            self._ended[peer] = self.failed
        elif run > self.run:
            self._later.append(message)
        elif run < self.run:
            return
        elif header[0] == "end":
            self._ended[peer] = header[1]
            self.failed = self.failed or header[1]
        else:
            yield header, tensors

    def begin_run(self) -> None:
        """Begin a run; all processes call it."""
        self.run += 1
        self.failed = ""
        self._ended.clear()
        self._arrived = time.monotonic()
        self._inbox.extendleft(reversed(self._later))
        self._later.clear()

    def end_run(self, error: str) -> str:
        """Tell the other processes how this run has ended here, and return the first error of theirs, or ""."""
        for process in range(self.processes):
            self.send(process, ("end", error))
        while len(self._ended) < self.processes - 1:
            self.wait()
            for _ in self.received():
                pass  # to a rank that failed here
        return next((text for text in self._ended.values() if text), "")

    def close(self) -> None:
        """End the threads; all processes call it."""
        for process in range(self.processes):
            self.send(process, ("close",))
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()
        dist.destroy_process_group(self._group)

    # Threads.

    def _send_all(self) -> None:
        while True:
            item = self._outbox.get()
            if item is None:
                return
            process, header, tensors = item
            try:
                text = pickle.dumps((header, [(t.shape, t.dtype) for t in tensors]))
                self._group.send([torch.tensor([len(text)])], process, 0).wait()
                self._group.send([torch.frombuffer(bytearray(text), dtype=torch.uint8)], process, 0).wait()
                for tensor in tensors:
                    if tensor.numel():
                        self._group.send([tensor.view(-1).view(torch.uint8)], process, 0).wait()
            except RuntimeError as error:
                self._arrive((process, (self.run, ("lost", str(error))), []))

    def _receive_all(self, peer: int) -> None:
        try:
            while True:
                length = torch.zeros(1, dtype=torch.int64)
                self._group.recv([length], peer, 0).wait()
                text = torch.empty(int(length), dtype=torch.uint8)
                self._group.recv([text], peer, 0).wait()
                header, described = pickle.loads(text.numpy().tobytes())
                tensors = []
                for shape, dtype in described:
                    tensors.append(torch.empty(shape, dtype=dtype))
                    if tensors[-1].numel():
                        self._group.recv([tensors[-1].view(-1).view(torch.uint8)], peer, 0).wait()
                if header[1][0] == "close":
                    return
                self._arrive((peer, header, tensors))
        except RuntimeError as error:
            self._arrive((peer, (self.run, ("lost", str(error))), []))
