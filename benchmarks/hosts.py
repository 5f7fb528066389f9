"""Hosts on one machine: namespaces for network, processes, names and memory, and a network between them.

    with Hosts(2, delay=1e-3) as hosts:
        process = hosts.start(0, [sys.executable, "rank.py"])
        hosts.cut(True)

Each host has an address (`address(0)`), a name (`host0`), a boot_id, a PID namespace and a /dev/shm.
The network is a device tun in each; a process in between forwards every packet after a delay, so that no
module of the kernel is needed. Needs util-linux, iproute2 and the right to make namespaces.
"""

import contextlib
import heapq
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

_UNSHARE = "unshare --user --map-root-user --net --uts --ipc --mount --pid --fork --kill-child".split()
_SET_UP = """
set -e
mount -t proc proc /proc
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount --bind {folder}/boot{index} /proc/sys/kernel/random/boot_id
mount --bind {folder}/hosts{index} /etc/hosts
hostname host{index}
ip link set lo up
exec {python} {file} host {index} {end}
"""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000  # linux/if_tun.h


class Hosts(contextlib.AbstractContextManager):
    """A number of hosts, until the end of `with`, which kills what runs in them.

    Args:
        count: of the hosts.
        delay: seconds that a packet takes from one host to another.

    Raises:
        OSError: this system or user may not make them; the message says why.
    """

    def __init__(self, count: int, delay: float = 0.0):
        self._folder = tempfile.TemporaryDirectory()
        self._hosts: list[subprocess.Popen] = []
        self._running: list[subprocess.Popen] = []
        self._forward: subprocess.Popen | None = None
        try:
            devices = [self._make(index, count) for index in range(count)]
            command = [sys.executable, __file__, "forward", str(delay), *map(str, devices)]
            self._forward = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=devices)
            for device in devices:
                os.close(device)
        except BaseException:
            self.close()
            raise

    def _make(self, index: int, count: int) -> int:
        """Starts a host; returns the descriptor of its network device."""
        folder = Path(self._folder.name)
        (folder / f"boot{index}").write_text(f"{uuid.uuid4()}\n")
        # Debian gives the own name an address of the loopback.
        known = [f"{address(other)} host{other}" for other in range(count) if other != index]
        lines = ["127.0.0.1 localhost", f"127.0.1.1 host{index}", *known]
        (folder / f"hosts{index}").write_text("\n".join(lines) + "\n")
        ours, theirs = socket.socketpair()
        script = _SET_UP.format(
            folder=folder, python=sys.executable, file=__file__, index=index, end=theirs.fileno()
        )
        try:
            host = subprocess.Popen(
                [*_UNSHARE, "sh", "-c", script], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
            )
        except FileNotFoundError as error:
            raise OSError(f"no namespaces: {error}") from None
        finally:
            theirs.close()
        self._hosts.append(host)
        with ours:
            ours.settimeout(20)
            _, devices, _, _ = socket.recv_fds(ours, 1, 1)
        if not devices:
            assert host.stderr
            raise OSError(f"no namespaces: {host.stderr.read().strip() or 'no network device'}")
        return devices[0]

    def start(self, index: int, command: list[str], **options) -> subprocess.Popen:
        """Starts a command on a host; `options` are those of Popen."""
        parent = self._hosts[index].pid
        child = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0]
        namespaces = "--user --net --uts --ipc --mount --pid --preserve-credentials".split()
        where = options.pop("cwd", os.getcwd())
        enter = ["nsenter", "--target", child, *namespaces, f"--wd={where}"]
        self._running.append(subprocess.Popen([*enter, *command], **options))
        return self._running[-1]

    def cut(self, cut: bool) -> None:
        """Drops every packet between hosts, or no longer."""
        assert self._forward and self._forward.stdin
        self._forward.stdin.write(b"1" if cut else b"0")
        self._forward.stdin.flush()

    def close(self) -> None:
        for process in (*self._hosts, *self._running, *filter(None, [self._forward])):
            process.kill()
            process.wait(10)
        self._folder.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()


def address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _be_host(index: int, end: int) -> None:
    """The first process of a host: makes its network device, and waits."""
    import fcntl

    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    for command in (f"addr add {address(index)}/24 dev eth0", "link set eth0 up mtu 65000"):
        subprocess.run(["ip", *command.split()], check=True)
    with socket.socket(fileno=end) as parent:
        socket.send_fds(parent, [b"-"], [device])
    while True:  # as PID 1 it reaps orphaned processes
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.2)


def _forward(delay: float, devices: list[int]) -> None:
    """Reads packets of every host, and writes each to its receiver after the delay."""
    by_address = {socket.inet_aton(address(index)): device for index, device in enumerate(devices)}
    waiting: list[tuple[float, int, int, bytes]] = []
    cut, count = False, 0
    while True:
        timeout = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        for file in select.select([0, *devices], [], [], timeout)[0]:  # poll's timeout is whole milliseconds
            data = os.read(file, 1 << 17)
            if file == 0:
                if not data:
                    return
                cut = data[-1:] == b"1"
            elif not cut and (to := by_address.get(data[16:20])) is not None:
                count += 1
                heapq.heappush(waiting, (time.monotonic() + delay, count, to, data))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, data = heapq.heappop(waiting)
            if not cut:
                os.write(to, data)


if __name__ == "__main__":
    what, first, *others = sys.argv[1:]
    if what == "host":
        _be_host(int(first), int(others[0]))
    else:
        _forward(float(first), list(map(int, others)))
