"""Folders of tiny models as transformers writes them, and the real default model where it was fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """folder(shape) -> (path, transformers' model); written once a session, so copy it before changing a file."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(shape: str) -> tuple[Path, Any]:
        if shape not in made:
            model = make(shape)
            path = tmp_path_factory.mktemp("models") / shape
            model.save_pretrained(path)
            made[shape] = path, model
        return made[shape]

    return get


@pytest.fixture(scope="session")
def smollm() -> Any:
    """The real default model in float32, or a skip where it was never fetched."""
    from pdlab.models.fetch import cached_path
    from pdlab.models.loading import load

    if cached_path("smollm2-135m") is None:
        pytest.skip("smollm2-135m is not in the cache; `pdlab model fetch smollm2-135m` puts it there")
    return load("smollm2-135m")
