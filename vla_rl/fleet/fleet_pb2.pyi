from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromRobot(_message.Message):
    __slots__ = ("hello", "records", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    records: Records
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., records: _Optional[_Union[Records, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "robot", "epoch", "boot_id", "schema_hash", "first_seq", "next_seq")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ROBOT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    robot: str
    epoch: bytes
    boot_id: bytes
    schema_hash: bytes
    first_seq: int
    next_seq: int
    def __init__(self, protocol: _Optional[int] = ..., robot: _Optional[str] = ..., epoch: _Optional[bytes] = ..., boot_id: _Optional[bytes] = ..., schema_hash: _Optional[bytes] = ..., first_seq: _Optional[int] = ..., next_seq: _Optional[int] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("seq", "kind", "episode", "task", "policy_version", "captured_ns", "wall_ns", "previous", "payload", "intervened", "count")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Record.Kind]
        STEP: _ClassVar[Record.Kind]
        EPISODE_END: _ClassVar[Record.Kind]
        EVENT: _ClassVar[Record.Kind]
        DROPPED: _ClassVar[Record.Kind]
    UNKNOWN: Record.Kind
    STEP: Record.Kind
    EPISODE_END: Record.Kind
    EVENT: Record.Kind
    DROPPED: Record.Kind
    SEQ_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_NS_FIELD_NUMBER: _ClassVar[int]
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    INTERVENED_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    seq: int
    kind: Record.Kind
    episode: str
    task: str
    policy_version: int
    captured_ns: int
    wall_ns: int
    previous: bytes
    payload: bytes
    intervened: bool
    count: int
    def __init__(self, seq: _Optional[int] = ..., kind: _Optional[_Union[Record.Kind, str]] = ..., episode: _Optional[str] = ..., task: _Optional[str] = ..., policy_version: _Optional[int] = ..., captured_ns: _Optional[int] = ..., wall_ns: _Optional[int] = ..., previous: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., intervened: _Optional[bool] = ..., count: _Optional[int] = ...) -> None: ...

class Records(_message.Message):
    __slots__ = ("records", "last_hash")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    LAST_HASH_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    last_hash: bytes
    def __init__(self, records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ..., last_hash: _Optional[bytes] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sent_ns",)
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    sent_ns: int
    def __init__(self, sent_ns: _Optional[int] = ...) -> None: ...

class FromServer(_message.Message):
    __slots__ = ("welcome", "ack", "nack", "policy", "notice", "clock")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    ack: Ack
    nack: Nack
    policy: Policy
    notice: Notice
    clock: Clock
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., clock: _Optional[_Union[Clock, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("server", "durable_seq", "credit_bytes", "policy", "clock")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    DURABLE_SEQ_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    server: bytes
    durable_seq: int
    credit_bytes: int
    policy: Policy
    clock: Clock
    def __init__(self, server: _Optional[bytes] = ..., durable_seq: _Optional[int] = ..., credit_bytes: _Optional[int] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ..., clock: _Optional[_Union[Clock, _Mapping]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("durable_seq", "credit_bytes")
    DURABLE_SEQ_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    durable_seq: int
    credit_bytes: int
    def __init__(self, durable_seq: _Optional[int] = ..., credit_bytes: _Optional[int] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("expected",)
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    expected: int
    def __init__(self, expected: _Optional[int] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("version", "state")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    version: int
    state: str
    def __init__(self, version: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("sentence",)
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    def __init__(self, sentence: _Optional[str] = ...) -> None: ...

class Clock(_message.Message):
    __slots__ = ("wall_ns", "echo_ns")
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    ECHO_NS_FIELD_NUMBER: _ClassVar[int]
    wall_ns: int
    echo_ns: int
    def __init__(self, wall_ns: _Optional[int] = ..., echo_ns: _Optional[int] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class ChunkRequest(_message.Message):
    __slots__ = ("sha256", "offset", "count")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    offset: int
    count: int
    def __init__(self, sha256: _Optional[bytes] = ..., offset: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Bytes(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
