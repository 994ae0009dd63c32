"""Make the masks of transformers the same for fake tensors as for tensors with values."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from amp_lab.core.tensors import storage_key
from amp_lab.model_call import ModelCall
from amp_lab.tracing.decisions import Decisions
from amp_lab.tracing.fake_device import attribute_set


@contextmanager
def masks_of_transformers(call: ModelCall, decisions: Decisions | None) -> Iterator[None]:
    """The block in which a fake run gets the masks of a real one, if transformers is imported.

    `call` has the fake inputs. With `decisions`, transformers reads values as in the real run that
    recorded the decisions. Without `decisions`, transformers reads no values.
    """
    if decisions is None:
        with _positions_in_order(call):
            yield
    else:
        with _values_asked_for():
            yield


@contextmanager
def _positions_in_order(call: ModelCall) -> Iterator[None]:
    """The block in which positions that a model numbers itself do not count as packed sequences.

    transformers reads them to see whether a row holds several sequences, and makes a mask for that
    if they are fake. A row does only if the caller gave the positions.
    """
    owner = sys.modules.get("transformers.masking_utils")
    find = getattr(owner, "find_packed_sequence_indices", None)
    if find is None:  # transformers is not imported, or is an older one
        yield
        return
    given = {storage_key(tensor) for tensor in call.tensors}

    def find_in_given(position_ids: torch.Tensor) -> torch.Tensor | None:
        return find(position_ids) if storage_key(position_ids) in given else None

    with attribute_set(owner, "find_packed_sequence_indices", find_in_given):
        yield


@contextmanager
def _values_asked_for() -> Iterator[None]:
    """The block in which transformers asks for the values of a fake mask, as for a real one's.

    transformers drops an attention mask if all its values are 1, but never looks at fake tensors.
    """
    owner = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(owner, "is_fake_tensor"):  # transformers is not imported, or is an older one
        yield
        return
    with attribute_set(owner, "is_fake_tensor", lambda tensor: False):
        yield
