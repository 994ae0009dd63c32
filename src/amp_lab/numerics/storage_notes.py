"""Notes on the memory of tensors, which are found again by any tensor that uses the same memory."""

from typing import Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from amp_lab.core.tensors import storage_key, stored_values

_Note = TypeVar("_Note")
_MANY = 10_000  # from here on, a new note drops those on storages that have been freed


class StorageNotes(Generic[_Note]):
    """One note for each storage: a view of a tensor has the note of the tensor."""

    def __init__(self):
        # The key is an address. While the weak reference exists, no other storage gets the same.
        self._entries: dict[int, tuple[StorageWeakRef, _Note]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def get(self, tensor: Tensor) -> _Note | None:
        """The note on the storage of a tensor; None if there is none."""
        key = storage_key(tensor)
        if key not in self._entries:
            return None
        _, note = self._entries[key]
        return note

    def put(self, tensor: Tensor, note: _Note) -> None:
        """Note something on the storage of a tensor, in place of an earlier note."""
        key = storage_key(tensor)
        if key is None:  # the tensor has no storage
            return
        if len(self._entries) > _MANY:
            self._drop_freed()
        storage = StorageWeakRef(stored_values(tensor).untyped_storage())
        self._entries[key] = (storage, note)

    def drop(self, tensor: Tensor) -> None:
        """Drop the note on the storage of a tensor, if there is one."""
        key = storage_key(tensor)
        if key in self._entries:
            del self._entries[key]

    def living(self) -> list[_Note]:
        """The notes on storages that still exist."""
        self._drop_freed()
        return [note for _, note in self._entries.values()]

    def _drop_freed(self) -> None:
        """Drop the notes on storages that have been freed."""
        for key, (storage, _) in list(self._entries.items()):
            if storage.expired():
                del self._entries[key]
