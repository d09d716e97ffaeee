"""deploy/Containerfile, built and run where Debian's buildah is installed, on a base made of this machine's own files."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from serve.container_root import write_root

ROOT = Path(__file__).resolve().parents[2]
POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}'  # for images that are made here
USER = 10001
pytestmark = pytest.mark.skipif(
    shutil.which("buildah") is None or os.geteuid() != 0, reason="needs buildah (apt-get install buildah) and root"
)


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command, with a store of its own that is gone with the folder."""
    place = tmp_path_factory.mktemp("store")
    return ["buildah", "--root", str(place / "images"), "--runroot", str(place / "run"), "--storage-driver", "overlay"]


@pytest.fixture(scope="module")
def image(buildah: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image of deploy/Containerfile without Ray, built without a network."""
    folder = tmp_path_factory.mktemp("base")
    write_root(folder / "root", "serve")
    packages = next((folder / "root").glob("usr/local/lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(packages), "hatchling"]
    if subprocess.run(pip).returncode:
        pytest.skip("needs hatchling, which builds the wheel, from a package index")
    (folder / "policy.json").write_text(POLICY)
    environment = "PIP_NO_INDEX=1 PIP_NO_COMPILE=1 PIP_NO_BUILD_ISOLATION=0"  # the last one says: without isolation
    (folder / "Containerfile").write_text(f"FROM scratch\nCOPY root/ /\nENV {environment}\n")
    build = [*buildah, "build", "--isolation", "chroot", "--signature-policy", str(folder / "policy.json")]
    subprocess.run([*build, "--tag", "base", str(folder)], check=True)
    options = ["--file", "deploy/Containerfile", "--build-arg", "BASE=localhost/base", "--build-arg", "EXTRAS=serve"]
    options += ["--ignorefile", "deploy/Containerfile.dockerignore", "--tag", "tide-serve"]
    subprocess.run([*build, *options, str(ROOT)], check=True)
    shutil.rmtree(folder)
    return "localhost/tide-serve"


@contextmanager
def running(buildah: list[str], image: str, bundle: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of the image's server on ``bundle``, and the process that runs it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    container = subprocess.check_output([*buildah, "from", "--pull-never", image], text=True).strip()
    run = [*buildah, "run", "--isolation", "chroot", "--volume", f"{bundle}:/models/engine:ro", container, "--"]
    process = subprocess.Popen([*run, "tide-serve", "/models/engine", "--port", str(port)], stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.communicate(timeout=60)
        subprocess.run([*buildah, "rm", container], check=True, stdout=subprocess.DEVNULL)


def test_the_image_answers_as_an_ordinary_user_and_ends_on_sigterm(buildah: list[str], image: str, bundle: Path) -> None:
    """Breaks: the recipe builds no image, or one whose server does not start, runs as root, or is killed when it should end."""
    with running(buildah, image, bundle) as (url, process):
        end = time.monotonic() + 60
        while not (server := _server(process)) or not _is_ready(url):
            assert process.poll() is None and time.monotonic() < end, "the server in the container did not start"
            time.sleep(0.1)
        assert set(server.uids()) == {USER}
        body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        server.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def _server(process: subprocess.Popen[str]) -> psutil.Process | None:
    """The server among the processes of the container; those of buildah may have its user and its command line, too."""
    inside = psutil.Process(process.pid).children(recursive=True)
    return next((one for one in inside if one.name() == "tide-serve"), None)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
