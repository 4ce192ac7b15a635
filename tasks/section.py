"""Sections of a recipe, and the line between identity and execution.

Every field of a section is *identity* (it changes the bytes of the output, so it is part of the cache key) unless
its type says ``Execution[...]`` (where and how it runs: never part of a key). The default is the safe side: a field
that someone forgot to mark costs a recomputation, never a stale result.
"""

from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class _ExecutionMark:
    """Metadata that marks a field as execution; see ``Execution``."""

    def __repr__(self) -> str:
        return "Execution"


EXECUTION = _ExecutionMark()

# A TypeVar alias: pydantic hides the metadata of a PEP 695 alias behind a definition reference.
T = TypeVar("T")
Execution = Annotated[T, EXECUTION]


class Section(BaseModel):
    """One section of the recipe: frozen, and unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        model_title_generator=lambda section: section.__name__.removesuffix("Config"),  # heads it in the UI's form
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and not _takes_bool(cls.model_fields[info.field_name].annotation):
            raise ValueError(f"{str(value).lower()} is not a value for this field")
        return value

    @classmethod
    def identity_fields(cls) -> set[str]:
        """Names of the fields that decide the bytes of the output."""
        return {name for name, field in cls.model_fields.items() if EXECUTION not in field.metadata}

    def identity(self) -> dict[str, Any]:
        """Fields that decide the bytes of the output, JSON-ready."""
        return self._select(execution=False)

    def execution(self) -> dict[str, Any]:
        """Fields that decide where and how it runs, JSON-ready."""
        return self._select(execution=True)

    def _select(self, *, execution: bool) -> dict[str, Any]:
        identity = self.identity_fields()
        names = set(type(self).model_fields) - identity if execution else identity
        return self.model_dump(mode="json", include=names)


def _takes_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(_takes_bool(part) for part in get_args(annotation))
