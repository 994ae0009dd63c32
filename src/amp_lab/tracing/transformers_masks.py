"""Make the masks of transformers the same for fake tensors as for tensors with values."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from amp_lab.core.tensors import storage_key
from amp_lab.model_call import ModelCall
from amp_lab.tracing.attributes import attribute_set
from amp_lab.tracing.decisions import Decisions


@contextmanager
def masks_of_transformers(call: ModelCall, decisions: Decisions | None) -> Iterator[None]:
    """The block in which a fake run gets the masks of a real one, if transformers is imported.

    `call` has the fake inputs. `decisions` has the results that ops which depend on values had in a
    real run: with them, transformers reads values as in that run. Without, it reads no values.
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

    transformers reads the positions to see whether a row of the batch holds several sequences. It
    cannot read fake ones, and then makes a mask for several. But a row has several only if the
    caller gives the positions, as an input.
    """
    masking_utils = sys.modules.get("transformers.masking_utils")
    find_packed = getattr(masking_utils, "find_packed_sequence_indices", None)
    if find_packed is None:  # transformers is not imported, or is an older one
        yield
        return
    input_keys = {storage_key(tensor) for tensor in call.tensors}

    def find_packed_in_inputs(position_ids: torch.Tensor) -> torch.Tensor | None:
        if storage_key(position_ids) not in input_keys:
            return None  # no row holds several sequences
        return find_packed(position_ids)

    with attribute_set(masking_utils, "find_packed_sequence_indices", find_packed_in_inputs):
        yield


@contextmanager
def _values_asked_for() -> Iterator[None]:
    """The block in which transformers asks for the values of a fake mask, as for a real one's.

    transformers drops an attention mask if all its values are 1, but never looks at fake tensors.
    """
    import_utils = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(import_utils, "is_fake_tensor"):  # not imported, or an older transformers
        yield
        return
    with attribute_set(import_utils, "is_fake_tensor", lambda tensor: False):
        yield
