"""Other people's models by name, kept in the user's config directory: where they are and how they are asked.

Of a key only the name of the variable that holds it is kept.
"""

import os
import secrets
from pathlib import Path
from typing import Any

import platformdirs
import yaml
from pydantic import Field

from flows.loading import read_yaml
from schemas.config import ConfigModel, nearest, validated
from schemas.errors import NotFoundError, StoreError
from schemas.names import checked_name
from stages.rollouts.endpoints.settings import EndpointConfig, EndpointExecution


class StoredModel(EndpointConfig, EndpointExecution):
    """A model as it is kept: the block ``rollouts.engine`` without its type."""

    type: str = "endpoint"  # type: ignore[assignment]

    def block(self) -> dict[str, Any]:
        """What ``rollouts.engine`` is set to."""
        return self.model_dump(mode="json", exclude_defaults=True) | {"type": "endpoint"}

    def parts(self) -> tuple[EndpointConfig, EndpointExecution]:
        """What changes the answers, and how it is asked."""
        values = self.model_dump()
        return EndpointConfig(**_of(EndpointConfig, values)), EndpointExecution(**_of(EndpointExecution, values))


class _File(ConfigModel):
    models: dict[str, StoredModel] = Field(default_factory=dict)


def models_file() -> Path:
    """Where they are kept: ``$XDG_CONFIG_HOME/rollmill``, or what the system has for that."""
    return Path(platformdirs.user_config_dir("rollmill", appauthor=False)) / "models.yaml"


def stored_models() -> dict[str, StoredModel]:
    """All, by name.

    Raises:
        ConfigError: the file is not as it was written.
    """
    file = models_file()
    if not file.exists():
        return {}
    return validated(_File, read_yaml(file), str(file)).models


def stored_model(name: str) -> StoredModel:
    """The one called ``name``.

    Raises:
        NotFoundError: with the nearest.
    """
    models = stored_models()
    if name not in models:
        hint = nearest(name, list(models)) if models else "store one: rollmill model setup"
        raise NotFoundError(f"no model is stored as {name!r}", hint=hint)
    return models[name]


def store_model(name: str, model: StoredModel) -> None:
    """Keeps a model; one of the same name is replaced.

    Raises:
        ConfigError: the name cannot be one.
        StoreError: the file cannot be written.
    """
    _write(stored_models() | {checked_name(name, "model name"): model})


def remove_model(name: str) -> None:
    """Forgets a model.

    Raises:
        NotFoundError: there is none of this name.
    """
    stored_model(name)
    models = stored_models()
    del models[name]
    _write(models)


def new_model(values: dict[str, Any]) -> StoredModel:
    """A model from what a user has given; what is None was not.

    Raises:
        ConfigError: with each wrong setting.
    """
    return validated(StoredModel, {name: value for name, value in values.items() if value is not None}, "the model")


def _of(model: type[ConfigModel], values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in model.model_fields}


def _write(models: dict[str, StoredModel]) -> None:
    """A reader finds the old file or the new one."""
    file = models_file()
    kept = {name: model.model_dump(mode="json", exclude_defaults=True) for name, model in sorted(models.items())}
    new = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(yaml.safe_dump({"models": kept}, sort_keys=False), encoding="utf-8")
        os.replace(new, file)
    except OSError as error:
        raise StoreError(f"cannot write {file}: {error}") from None
