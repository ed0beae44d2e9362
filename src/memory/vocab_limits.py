"""What cannot be split along the vocabulary."""

from __future__ import annotations

from src.errors import NotCoveredError, UserError
from src.spec import Job


def scaled_table(job: Job) -> NotCoveredError:
    """The error for an embedding whose module does more than look up."""
    return NotCoveredError(
        key="vocab_parallel",
        value="true",
        allowed=f"false: the embedding of {job.model.model_type} scales what it looks up",
    )


def uneven_vocabulary(size: int, degree: int) -> UserError:
    """The error for a vocabulary that the group does not divide."""
    return UserError(
        key="vocab_parallel",
        value="true",
        allowed=f"false: the tensor-parallel degree {degree} does not divide {size} rows",
    )
