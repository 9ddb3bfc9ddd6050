"""A real Triton Server for the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jevany_server.process import Ports, TritonServer
from tests.checkpoint_factory import make_checkpoint

REPOSITORY = Path(__file__).parents[2] / "model_repository"
FREE_PORTS = Ports(0, 0, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.triton)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Both trained models of the repository, served for the whole session."""
    log = tmp_path_factory.mktemp("server") / "triton.log"
    with (
        log.open("wb") as stream,
        TritonServer(REPOSITORY, ["jevany-tiny", "jevany-tiny-direct-token"], ports=FREE_PORTS, log=stream) as running,
    ):
        running.wait_until_ready(120)
        yield running


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one model, ``small``, of random weights, for tests that break or stop a server."""
    model = tmp_path / "models" / "small"
    (model / "1").mkdir(parents=True)
    made = make_checkpoint(tmp_path / "files")
    shutil.copy(REPOSITORY / "jevany-tiny" / "1" / "model.py", model / "1")
    config = (REPOSITORY / "jevany-tiny" / "config.pbtxt").read_text()
    assert '"jevany-tiny"' in config
    (model / "config.pbtxt").write_text(config.replace('"jevany-tiny"', '"small"'))
    (model / "1" / "checkpoint").symlink_to(made.adapter)
    (model / "1" / "base").symlink_to(made.base)
    return model.parent
