"""Simulates hosts on one machine by Linux namespaces: for network, processes, host names and shared memory.

    with SimulatedHosts(2, delay=1e-3) as hosts:
        process = hosts.start(0, [sys.executable, "rank.py"])
        hosts.set_network_down(True)

Each host has an address (`host_address(0)`), a name (`host0`), a boot_id, a PID namespace and a /dev/shm.
Each host has a tun device. One process forwards all packets between these devices after a delay, since a
delay by the kernel would need a module. Needs util-linux, iproute2 and the right to make namespaces.
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
from typing import NamedTuple

_UNSHARE = "unshare --user --map-root-user --net --uts --ipc --mount --pid --fork --kill-child".split()
_HOST_SCRIPT = """
set -e
mount -t proc proc /proc
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount --bind {folder}/boot{index} /proc/sys/kernel/random/boot_id
mount --bind {folder}/hosts{index} /etc/hosts
hostname host{index}
ip link set lo up
exec {python} {file} host {index} {socket_fd}
"""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000  # linux/if_tun.h


class SimulatedHosts(contextlib.AbstractContextManager):
    """Hosts that exist until the end of `with`, which kills all processes on them.

    Args:
        count: number of hosts.
        delay: seconds that a packet takes from one host to another.

    Raises:
        OSError: this system or user may not make namespaces; the message says why.
    """

    def __init__(self, count: int, delay: float = 0.0):
        self._folder = tempfile.TemporaryDirectory()
        self._hosts: list[subprocess.Popen] = []
        self._processes: list[subprocess.Popen] = []
        self._forwarder: subprocess.Popen | None = None
        try:
            devices = [self._start_host(index, count) for index in range(count)]
            command = [sys.executable, __file__, "forward", str(delay), *map(str, devices)]
            self._forwarder = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=devices)
            for device in devices:
                os.close(device)
        except BaseException:
            self.close()
            raise

    def _start_host(self, index: int, count: int) -> int:
        """Starts a host and returns the file descriptor of its network device, which the host sends."""
        folder = Path(self._folder.name)
        (folder / f"boot{index}").write_text(f"{uuid.uuid4()}\n")
        # As on Debian, the name of the host has a loopback address in its own file.
        peers = [f"{host_address(peer)} host{peer}" for peer in range(count) if peer != index]
        lines = ["127.0.0.1 localhost", f"127.0.1.1 host{index}", *peers]
        (folder / f"hosts{index}").write_text("\n".join(lines) + "\n")
        parent_socket, host_socket = socket.socketpair()
        script = _HOST_SCRIPT.format(
            folder=folder, python=sys.executable, file=__file__, index=index, socket_fd=host_socket.fileno()
        )
        try:
            host = subprocess.Popen(
                [*_UNSHARE, "sh", "-c", script],
                pass_fds=[host_socket.fileno()],
                stderr=subprocess.PIPE,
                text=True,
            )
        except FileNotFoundError as error:
            raise OSError(f"SimulatedHosts: making namespaces failed: {error}") from None
        finally:
            host_socket.close()
        self._hosts.append(host)
        with parent_socket:
            parent_socket.settimeout(20)  # seconds
            _, devices, _, _ = socket.recv_fds(parent_socket, 1, 1)
        if not devices:
            assert host.stderr
            reason = host.stderr.read().strip() or "there is no network device"
            raise OSError(f"SimulatedHosts: making namespaces failed: {reason}")
        return devices[0]

    def start(self, index: int, command: list[str], **options) -> subprocess.Popen:
        """Starts a command on a host and returns its process; `options` are those of Popen."""
        # The process of Popen is unshare; only its child is inside the new PID namespace.
        unshare_pid = self._hosts[index].pid
        host_pid = Path(f"/proc/{unshare_pid}/task/{unshare_pid}/children").read_text().split()[0]
        namespaces = "--user --net --uts --ipc --mount --pid --preserve-credentials".split()
        working_folder = options.pop("cwd", os.getcwd())
        nsenter = ["nsenter", "--target", host_pid, *namespaces, f"--wd={working_folder}"]
        self._processes.append(subprocess.Popen([*nsenter, *command], **options))
        return self._processes[-1]

    def set_network_down(self, is_down: bool) -> None:
        """Makes the network drop every packet between hosts, or carry packets again."""
        assert self._forwarder and self._forwarder.stdin
        self._forwarder.stdin.write(b"1" if is_down else b"0")
        self._forwarder.stdin.flush()

    def close(self) -> None:
        """Kills all processes, and removes the files of the hosts."""
        for process in (*self._hosts, *self._processes, *filter(None, [self._forwarder])):
            process.kill()
            process.wait(10)
        self._folder.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()


def host_address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _host_main(index: int, socket_fd: int) -> None:
    """Runs the first process of a host, which makes the network device, sends it to the parent, and stays."""
    import fcntl

    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    for command in (f"addr add {host_address(index)}/24 dev eth0", "link set eth0 up mtu 65000"):
        subprocess.run(["ip", *command.split()], check=True)
    with socket.socket(fileno=socket_fd) as parent:
        socket.send_fds(parent, [b"-"], [device])  # A message needs a byte.
    while True:  # PID 1 of a namespace reaps orphaned processes.
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.2)


class _Packet(NamedTuple):
    due_time: float  # The receiver gets the packet at this time of time.monotonic().
    count: int  # Packets that are due at the same time keep their order.
    receiver: int  # a device
    data: bytes


def _forward_packets(delay: float, devices: list[int]) -> None:
    """Reads the packets of every host, and writes each to its receiver after the delay."""
    # The address is the destination in an IPv4 packet, bytes 16 to 19.
    device_by_address = {
        socket.inet_aton(host_address(index)): device for index, device in enumerate(devices)
    }
    queue: list[_Packet] = []  # a heap
    is_down, count = False, 0
    while True:
        timeout = None if not queue else max(0.0, queue[0].due_time - time.monotonic())
        for file in select.select([0, *devices], [], [], timeout)[0]:  # poll's timeout is whole milliseconds.
            data = os.read(file, 1 << 17)  # more than the MTU of a device
            if file == 0:  # The program reads commands of `set_network_down`, and the end of its parent.
                if not data:
                    return
                is_down = data[-1:] == b"1"
            elif not is_down and (receiver := device_by_address.get(data[16:20])) is not None:
                count += 1
                heapq.heappush(queue, _Packet(time.monotonic() + delay, count, receiver, data))
        while queue and queue[0].due_time <= time.monotonic():
            packet = heapq.heappop(queue)
            if not is_down:
                os.write(packet.receiver, packet.data)


if __name__ == "__main__":
    if sys.argv[1] == "host":
        _host_main(index=int(sys.argv[2]), socket_fd=int(sys.argv[3]))
    else:  # "forward"
        _forward_packets(delay=float(sys.argv[2]), devices=list(map(int, sys.argv[3:])))
