"""Reads the host's kernel log, if possible: what the driver reports about the rank's device, and failing memory or processors.

    6,1234,98765432,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.      /dev/kmsg
    [98765.432] NVRM: Xid (PCI:0000:3b:00): 79, ...                                             a file (`HOLTER_KERNEL_LOG`)

Only lines written after the start count. Errors that the hardware corrected itself are not reported.
"""

import logging
import os
import re
import stat

from holter.records import Device, DeviceEvent

XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<address>[0-9a-fA-F:.]+)\): (?P<xid>\d+)")
OF_MEMORY = re.compile(
    r"EDAC .*\b[1-9]\d* UE\b|Uncorrected hardware memory error|Memory failure: .*(?:recovery action|Killing|hardware memory corruption)|HANDLING MCE MEMORY ERROR.*uncorrected",
    re.IGNORECASE,
)
OF_MACHINE = re.compile(r"\[Hardware Error\]: .*(?:Uncorrected|Fatal|Machine Check Exception|PANIC)", re.IGNORECASE)
AMD = re.compile(
    r"amdgpu (?P<address>[0-9a-fA-F:.]+): .*(?P<what>uncorrectable hardware errors? detected|GPU reset begin)",
    re.IGNORECASE,
)
NONE_FOUND = re.compile(r"\b0 uncorrectable", re.IGNORECASE)
MAX_LINES = 256
"""Number of lines read at a time."""
MAX_TEXT = 300

logger = logging.getLogger(__name__)


class KernelLog:
    """Follows one log; if its path cannot be read, that is logged once and is no fault."""

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        self._rest = b""
        self._is_device = False
        if not path:
            return
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self._is_device = stat.S_ISCHR(os.fstat(self._descriptor).st_mode)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            logger.info("the kernel's log is not read: %s: %s", path, error.strerror)
            self._close()

    def read(self, device: Device | None) -> list[DeviceEvent]:
        """Return the new events of this device or of the host; never waits."""
        return [event for line in self._lines() for event in events_in(line, device)]

    def _lines(self) -> list[str]:
        lines: list[str] = []
        while self._descriptor >= 0 and len(lines) < MAX_LINES:
            try:
                chunk = os.read(self._descriptor, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:
                # The kernel overwrote lines before they were read.
                continue
            except OSError as error:
                logger.info("the kernel's log is read no more: %s", error.strerror)
                self._close()
                break
            if not chunk:
                break
            if self._is_device:
                lines.append(chunk.decode(errors="replace").partition(";")[2].splitlines()[0] if b";" in chunk else "")
                continue
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            lines += [line.decode(errors="replace") for line in whole]
        return lines

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def events_in(line: str, device: Device | None) -> list[DeviceEvent]:
    """Return the events that one line reports about this device or the whole host."""
    text = line.strip()[:MAX_TEXT]
    of_device = XID.search(line) or AMD.search(line)
    if of_device is not None:
        is_ours = device is not None and is_same_address(of_device["address"], device.address)
        return (
            [_of_device(of_device, text, device)]
            if device is not None and is_ours and not NONE_FOUND.search(line)
            else []
        )
    if OF_MEMORY.search(line):
        return [DeviceEvent(uuid="", kind="memory", source="kernel", text=text)]
    return [DeviceEvent(uuid="", kind="machine", source="kernel", text=text)] if OF_MACHINE.search(line) else []


def _of_device(found: re.Match[str], text: str, device: Device) -> DeviceEvent:
    if found.re is XID:
        number = int(found["xid"])
        return DeviceEvent(
            uuid=device.uuid, kind="xid", source="kernel", xid=number, text=text, is_assumed=device.is_assumed
        )
    is_reset = "reset" in found["what"].lower()
    return DeviceEvent(
        uuid=device.uuid,
        kind="machine" if is_reset else "memory",
        source="kernel",
        text=text,
        is_assumed=device.is_assumed,
    )


def is_same_address(one: str, other: str) -> bool:
    """Whether two PCI addresses are of one device.

    The kernel leaves out the function, and some drivers the domain: `0000:3b:00`, `3b:00.0`.
    """
    return bool(one) and bool(other) and _place(one) == _place(other)


def _place(address: str) -> tuple[int, ...]:
    parts = address.lower().partition(".")[0].split(":")
    try:
        numbers = [int(part, 16) for part in parts if part]
    except ValueError:
        return ()
    return (0, *numbers) if len(numbers) == 2 else tuple(numbers)  # noqa: PLR2004 - bus and device, without a domain
