"""Reading a file that another process is still writing."""

from pathlib import Path

_PIECE = 1 << 20


class LineTail:
    """New whole lines of a growing file at each `read`; the file is opened for the moment of reading only."""

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if at_end and path.exists() else 0
        self._rest = b""

    def read(self, *, ended: bool = False) -> list[str]:
        """Lines that were completed since the last call. A carriage return (a progress bar) ends a line too.

        `ended` says that nothing more will be written, so that a last line without an end counts.
        """
        try:
            file = open(self._path, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            return []
        lines: list[bytes] = []
        with file:
            file.seek(self._offset)
            while data := file.read(_PIECE):
                self._offset += len(data)
                *whole, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
                lines += whole
                # A piece without a line end is cut: memory stays bounded whatever the child prints.
                if len(self._rest) > _PIECE:
                    lines.append(self._rest)
                    self._rest = b""
        if ended:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", errors="replace") for line in lines if line]


def last_lines(path: Path, count: int) -> str:
    """The last lines of a file, "" when there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - (64 << 10)))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-count:])
