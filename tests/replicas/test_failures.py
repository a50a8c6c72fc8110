"""A failure is told in one line that begins with what is wrong."""

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from pengserve.planners.types.errors import ConfigError
from pengserve.replicas.failures import MAX_CHARACTERS, describe_failure, told_failure


class _Config(BaseModel):
    """As vLLM's configurations are."""

    max_model_len: int = Field(default=1, ge=-1)

    @field_validator("max_model_len")
    @classmethod
    def _fits(cls, value: int) -> int:
        if value > 100:
            raise ValueError(f"max_model_len ({value}) is too long. To allow it, set X. {'It is unwise. ' * 20}")
        return value


def _refused(value: object) -> ValidationError:
    with pytest.raises(ValidationError) as refusal:
        _Config.model_validate({"max_model_len": value})
    return refusal.value


def test_a_validation_error_names_the_engine_argument_and_leaves_the_hints_out():
    assert describe_failure(_refused(999)) == "engine.max_model_len: max_model_len (999) is too long"
    assert describe_failure(_refused("lots")).startswith("engine.max_model_len: Input should be a valid integer")


def test_another_error_has_its_type_and_is_one_line():
    assert describe_failure(OSError("no such\n  file")) == "OSError: no such file"
    assert describe_failure(KeyError()) == "KeyError"
    assert len(describe_failure(ValueError("x" * 10_000))) < MAX_CHARACTERS + 10


def test_a_sentence_of_our_own_stands_alone():
    error = ConfigError("engine.x is no vLLM engine argument")
    assert told_failure(error) == str(error)
    assert describe_failure(error) == f"ConfigError: {error}"
