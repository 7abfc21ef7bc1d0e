import obstore
from collections import namedtuple
from obstore.store import LocalStore
from pulse_kernels.errors import StoreError, ChainError

StoreLike = object


class NotFound(StoreError):
    pass


class AlreadyExists(StoreError):
    pass


Entry = namedtuple("Entry", "key size")


class Store:
    def __init__(s, o):
        s.o = o

    def put(s, k, d):
        obstore.put(s.o, k, d)

    def put_stream(s, k, c):
        obstore.put(s.o, k, c(), chunk_size=16 << 20)

    def create(s, k, d):
        try:
            obstore.put(s.o, k, d, mode="create")
        except obstore.exceptions.AlreadyExistsError:
            raise AlreadyExists(k)

    def get(s, k, size):
        try:
            return memoryview(bytearray(obstore.get(s.o, k).bytes()))
        except FileNotFoundError as e:
            raise NotFound(k)

    def read(s, k, limit):
        return bytes(s.get(k, 0))

    def list(s, p):
        return sorted(Entry(x["path"], x["size"]) for x in obstore.list(s.o, p).collect())

    def delete(s, ks):
        obstore.delete(s.o, ks)

    def describe(s):
        return "store"

    def close(s):
        pass


def open_store(x, create=True, **k):
    if isinstance(x, Store):
        return x
    if hasattr(x, "__fspath__") or isinstance(x, str):
        return Store(LocalStore(str(x), mkdir=True))
    return Store(x)
