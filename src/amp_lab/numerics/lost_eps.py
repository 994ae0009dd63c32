"""The tensors that an eps was meant to keep above 0, for `find_nonfinite`."""

from torch import Tensor

from amp_lab.core.tensors import tensors_in
from amp_lab.numerics.op_constants import keeps_zero, lost_eps
from amp_lab.numerics.storage_notes import StorageNotes
from amp_lab.numerics.stored_parts import parts_of
from amp_lab.numerics.watched_ops import Call


class LostEps:
    """Notes, by storage, of each eps that was added to a tensor and is 0 in its dtype."""

    def __init__(self) -> None:
        self._notes = StorageNotes[float]()

    def follow(self, call: Call, results: list[Tensor]) -> None:
        """Note the results that were meant to be above 0 by an eps that is 0 in their dtype.

        These are results of an op that adds or clamps to such an eps, and of ops, such as a root,
        that keep the zeros of such a result.
        """
        for tensor in results:
            eps = lost_eps(call, tensor.dtype)
            if eps is None and self._notes and keeps_zero(call):
                eps = self.of(tensors_in((call.args, call.kwargs)))
            if eps is not None:
                self._notes.put(tensor, eps)

    def of(self, tensors: list[Tensor]) -> float | None:
        """The noted eps of the first of these tensors that has one and contains a zero; or None."""
        for tensor in tensors:
            eps = self._notes.get(tensor)
            if eps is not None and not all(part.all() for part in parts_of(tensor)):
                return eps
        return None
