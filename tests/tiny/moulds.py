"""Copies of whole pipelines, several times as fast as `copy.deepcopy` makes them: the tests take some thousand."""

import io
import pickle
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn


class Mould:
    """Of which any number of equal objects are cast: a pickle of all but tensors, functions and classes.

    Each has tensors of its own. What is one tensor in two places stays one, and tensors that share memory share it in each of them, too.
    """

    def __init__(self, original: Any):
        """original: as it is now; it may change later."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(original)
        self._pickle, self._kept = file.getvalue(), [*map(_Owned(), pickler.kept)]

    def cast(self) -> Any:
        return _Unpickler(io.BytesIO(self._pickle), self._kept).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.kept: list[Any] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, each: Any) -> int | None:
        if not isinstance(each, Tensor | FunctionType | type):
            return None
        if id(each) not in self._numbers:
            self._numbers[id(each)] = len(self.kept)
            self.kept.append(each)
        return self._numbers[id(each)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: list[Any]):
        super().__init__(file)
        self._kept, self._owned, self._cast = kept, _Owned(), {}

    def persistent_load(self, number: int) -> Any:
        if number not in self._cast:
            self._cast[number] = self._owned(self._kept[number])
        return self._cast[number]


class _Owned:
    """Makes copies of tensors, as `copy.deepcopy` does; functions and classes are themselves."""

    def __init__(self):
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        storage = each.untyped_storage()
        own = self._storages.setdefault(storage._cdata, storage.clone())
        made = torch.empty(0, dtype=each.dtype, device=each.device).set_(own, each.storage_offset(), each.shape, each.stride())
        return nn.Parameter(made, each.requires_grad) if isinstance(each, nn.Parameter) else made
