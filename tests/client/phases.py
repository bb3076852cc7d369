"""What each phase of a measurement takes: on the wall, and of the processor, for each side."""

import os
import time
from pathlib import Path
from typing import Callable, Iterable


def of_process(read, path: str):
    """What `read` gives for a path in /proc, and nothing when that process or thread has ended."""
    try:
        return read(path)
    except (FileNotFoundError, ProcessLookupError):
        return ""


def text_of(path: str) -> str:
    return of_process(lambda path: Path(path).read_text(), path)


def children(pid: int) -> list[int]:
    tasks = of_process(os.listdir, f"/proc/{pid}/task")
    lists = [text_of(f"/proc/{pid}/task/{task}/children") for task in tasks]
    return [int(child) for children in lists for child in children.split()]


def below(pid: int) -> list[int]:
    """All descendants. A server that is process 1 has another process that does the work."""
    found = children(pid)
    return found + [pid for child in found for pid in below(child)]


def processor_seconds(pids: Iterable[int]) -> float:
    """What these processes, and those of their children that have ended, have used so far."""
    ticks = 0
    for pid in pids:
        words = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
        ticks += sum(int(word) for word in words[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


class Clock:
    """Measures phases: the time on the wall, and what the processes of each side used of the processor."""

    def __init__(self, sides: dict[str, Callable[[], Iterable[int]]]) -> None:
        self._sides = sides
        self.rows = []

    def _used(self) -> list[float]:
        return [processor_seconds(pids()) for pids in self._sides.values()]

    def begin(self, way: str, phase: str) -> Callable[[], None]:
        """Begins a phase; what is returned ends it."""
        before, started = self._used(), time.monotonic()

        def end() -> None:
            wall = time.monotonic() - started
            used = [after - first for after, first in zip(self._used(), before)]
            self.rows.append((way, phase, wall, *used))

        return end

    def measure(self, way: str, phase: str, act):
        end = self.begin(way, phase)
        result = act()
        end()
        return result

    def show(self) -> None:
        print(f"{'':29}{'wall s':>8}   processor s:" + "".join(f"{side:>9}" for side in self._sides))
        for way in dict.fromkeys(row[0] for row in self.rows):
            rows = [row for row in self.rows if row[0] == way]
            for _, phase, *figures in rows:
                self._line(phase, figures, way)
            # Booting is not part of what is compared.
            rows = [row for row in rows if row[1] != "hosts"]
            self._line("together", [sum(column) for column in zip(*(row[2:] for row in rows))], way)

    def _line(self, phase: str, figures: list[float], way: str) -> None:
        wall, *used = figures
        line = f"{way:19}{phase:10}{wall:8.2f}   {'':12}"
        print(line + "".join(f"{seconds:9.2f}" for seconds in used))

    def together(self, way: str) -> float:
        return sum(row[2] for row in self.rows if row[0] == way and row[1] != "hosts")
