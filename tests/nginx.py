"""A real nginx on a free port, with the configuration that is shipped for two daemons and a router."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.patience import eventually

CONF = Path(__file__).parents[1] / "deploy/kubernetes/components/router/quire.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@contextmanager
def nginx(folder: Path, daemons: list[str], router: str) -> Iterator[str]:
    """Run nginx with the names of the configuration replaced by these addresses."""
    port = free_port()
    conf = CONF.read_text()
    names = {f"quire-{place}:8000": each for place, each in enumerate(daemons)} | {"127.0.0.1:9000": router}
    for name, address in {**names, "listen 8080": f"listen 127.0.0.1:{port}"}.items():
        assert name in conf
        conf = conf.replace(name, address)
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = f"daemon off; master_process off; pid {folder}/pid; events {{}} http {{ access_log off; {paths}\n{conf}}}"
    (folder / "nginx.conf").write_text(main)
    assert NGINX
    command = [NGINX, "-p", str(folder), "-e", str(folder / "error.log"), "-c", "nginx.conf"]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    with subprocess.Popen(command) as process:
        try:
            eventually(lambda: _listens(port))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
