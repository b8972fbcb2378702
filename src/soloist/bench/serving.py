"""A server that the benchmark starts, restarts and stops itself (`--serve "soloist serve demo"`)."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from pathlib import Path

from soloist.bench.client import Client
from soloist.errors import UserError

STOP_S = 30.0


class OwnServer:
    """Runs one server command. Output goes to `log`; the process is stopped with SIGTERM, then SIGKILL."""

    def __init__(self, command: str, url: str, log: Path, start_s: float = 600.0) -> None:
        self.command = shlex.split(command)
        self.url = url
        self.log = log
        self.start_s = start_s
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> float:
        """Start and wait until it answers; returns the seconds that took. Raises UserError when it does not."""
        begin = time.perf_counter()
        if await _answers(self.url):
            raise UserError(f"Something already answers at {self.url}.", "Stop it, or leave out --serve to use it.")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self.command, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                raise UserError(f"{self.command[0]} cannot be run ({error.strerror}).", "Check --serve.") from None
        while time.perf_counter() - begin < self.start_s:
            if self._process.returncode is not None:
                tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
                raise UserError(
                    f"The server ended with exit code {self._process.returncode}: " + " / ".join(tail),
                    f"The whole log is in {self.log}.",
                )
            if await _answers(self.url):
                return time.perf_counter() - begin
            await asyncio.sleep(0.2)
        await self.stop()
        raise UserError(f"The server did not answer within {self.start_s:.0f} s.", f"Its log is in {self.log}.")

    async def stop(self, *, kill: bool = False) -> None:
        """End the process group: SIGTERM and a grace period, or SIGKILL at once."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def restart(self, *, kill: bool = False) -> float:
        """Stop and start again; returns the seconds until it answered."""
        await self.stop(kill=kill)
        return await self.start()


async def _answers(url: str) -> bool:
    async with Client(url, model="?", timeout=5.0) as client:
        return await client.get("/v1/models") is not None or (await client.get("/health")) is not None
