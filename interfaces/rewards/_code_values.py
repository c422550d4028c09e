"""Plain values exchanged between a program and its tests: each as JSON with its type, never code.

Copied into the sandboxes of both, where only the standard library is available.
"""

SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encoded(value, handle):
    """JSON-able form; `handle` numbers a value that is not plain. Types must match exactly: a
    subclass may lie."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return {"int": hex(value)}
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [encoded(entry, handle) for entry in value]}
    if kind is dict:
        return {
            "dict": [[encoded(key, handle), encoded(entry, handle)] for key, entry in value.items()]
        }
    if kind in (bytes, bytearray):
        return {"bytes": bytes(value).hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    return {"object": handle(value)}


def decoded(encoded_value, object_of):
    """The value; `object_of` maps a number to its object.
    Raises for anything that `encoded` does not produce."""
    if encoded_value is None or isinstance(encoded_value, bool | str | float):
        return encoded_value
    ((kind, content),) = encoded_value.items()
    if kind == "int":
        return int(content, 16)
    if kind in SEQUENCES:
        return SEQUENCES[kind](decoded(entry, object_of) for entry in content)
    if kind == "dict":
        return {decoded(key, object_of): decoded(entry, object_of) for key, entry in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "object":
        return object_of(content)
    raise ValueError(f"no value: {kind}")
