"""Faults in what policies and other people's programs say to each other across a WebSocket."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SOCKET, _ARRAYS, _SEEN = (f"vla_rl/serving/{name}.py" for name in ("websocket", "arrays", "observation"))
_OPENPI, _MESSAGES, _CLIENT = (f"vla_rl/serving/{name}.py" for name in ("openpi", "vla_eval", "vla_eval_client"))
_EPISODE, _SERVER, _REMOTE = (f"vla_rl/serving/{name}.py" for name in ("episode", "server", "remote"))
_ON_SOCKET, _ON_MESSAGES = "tests/serving/test_websocket.py::", "tests/serving/test_messages.py::"
_ON_SERVER, _ON_REMOTE = "tests/serving/test_server.py::", "tests/serving/test_remote.py::"
_ARRAY = f"{_ON_MESSAGES}test_an_array_that_is_none_is_refused"
_PICTURE = f"{_ON_MESSAGES}test_a_picture_that_cannot_be_read_is_refused"
_MISREAD = f"{_ON_MESSAGES}test_what_the_policy_would_misread_is_refused"
_BEGUN = f"{_ON_SOCKET}test_a_message_has_begun_with_its_first_byte_whatever_came_with_it"
_NEXT = f"{_ON_SERVER}test_every_observation_gets_the_next_action_of_the_chunk"
_DRAWN = f"{_ON_SERVER}test_what_an_episode_draws_depends_on_its_task_and_the_seed_alone"
_SESSIONS = f"{_ON_REMOTE}test_vla_eval_every_environment_has_a_session_whose_episodes_begin_with_ours"
_TOLD = f"{_ON_REMOTE}test_a_model_server_is_told_when_episodes_begin_and_end"
_ON_FIELDS = "tests/serving/test_fields.py::test_a_wrong_field_of_the_harness_is_an_error_and_nobody_else_is_disturbed"

FAULTS = (
    Fault(
        "a server takes messages of any size",
        _SOCKET,
        "ServerProtocol(origins=[None], max_size=limits.message_bytes,",
        "ServerProtocol(origins=[None], max_size=None,",
        (f"{_ON_SOCKET}test_fragments_together_are_a_message_that_can_be_oversized",),
    ),
    Fault(
        "a server talks to web pages",
        _SOCKET,
        "ServerProtocol(origins=[None], max_size",
        "ServerProtocol(origins=None, max_size",
        (f"{_ON_SOCKET}test_a_web_page_is_refused",),
    ),
    Fault(
        "bytes that keep dripping are waited for again and again",
        _SOCKET,
        "            if left <= 0:",
        "            if False:",
        (f"{_ON_SOCKET}test_a_slow_message_is_refused_however_steadily_it_drips",),
    ),
    Fault(
        "a message that has begun may take as long as silence",
        _SOCKET,
        "self._read(idle_until if self._begun is None else self._begun + self.limits.message_s)",
        "self._read(idle_until)",
        (_BEGUN,),
    ),
    Fault(
        "the account of frames forgets their mask",
        _SOCKET,
        "masked = 4 if isinstance(self._protocol, ServerProtocol) else 0",
        "masked = 0",
        (f"{_ON_SOCKET}test_pings_do_not_count_as_a_message_that_has_begun",),
    ),
    Fault(
        "what came with the opening request is not accounted for",
        _SOCKET,
        'self._note(len(arrived.partition(b"\\r\\n\\r\\n")[2]) - len(arrived))',
        "self._note(-len(arrived))",
        (f"{_ON_SOCKET}test_bytes_that_came_with_the_opening_belong_to_a_message",),
    ),
    Fault(
        "a peer that does not read blocks for ever",
        _SOCKET,
        "self._push(self.limits.message_s)",
        "self._push(1e6)",
        (f"{_ON_SOCKET}test_who_does_not_read_is_not_waited_for",),
    ),
    Fault(
        "who has said goodbye has broken the connection when our answer reaches nobody",
        _SOCKET,
        "            if self._protocol.close_rcvd is None:",
        "            if True:",
        (f"{_ON_SOCKET}test_who_has_said_goodbye_has_left_although_our_answer_reaches_nobody",),
    ),
    Fault(
        "a peer that takes everything at once is too slow for a process that was held up",
        _SOCKET,
        "if rest and time.monotonic() >= until:",
        "if time.monotonic() >= until:",
        (f"{_ON_SOCKET}test_what_is_taken_at_once_is_in_time_however_late_it_is_sent",),
    ),
    Fault(
        "objects are a dtype like others",
        _ARRAYS,
        'r"[<>|=]?([biuf][1248])"',
        'r"[<>|=]?([biufOVUcM].*)"',
        (_ARRAY,),
    ),
    Fault(
        "the bytes of an array need not fit its shape",
        _ARRAYS,
        "if not isinstance(data, bytes) or math.prod(shape) * kind.itemsize != len(data):",
        "if not isinstance(data, bytes):",
        (_ARRAY,),
    ),
    Fault(
        "bools keep the bytes that came",
        _ARRAYS,
        "raw = np.frombuffer(data, np.uint8 if kind == np.bool_ else kind)",
        "raw = np.frombuffer(data, kind)",
        (f"{_ON_MESSAGES}test_bools_are_true_or_false_whatever_their_bytes",),
    ),
    Fault(
        "a message may hold any number of entries",
        _ARRAYS,
        "if items > _MAX_ITEMS:",
        "if False:",
        (f"{_ON_MESSAGES}test_a_small_message_cannot_ask_for_a_lot_of_memory",),
    ),
    Fault(
        "a picture of any format is opened",
        _ARRAYS,
        'formats=("PNG", "JPEG")',
        "formats=None",
        (_PICTURE,),
    ),
    Fault(
        "a picture need not have the size that was declared",
        _ARRAYS,
        "if found != (height, width, channels) or height * width > _MAX_PIXELS:",
        "if height * width > _MAX_PIXELS:",
        (_PICTURE,),
    ),
    Fault(
        "a state of NaN reaches the policy",
        _SEEN,
        "if not np.isfinite(state).all():",
        "if False:",
        (_MISREAD,),
    ),
    Fault(
        "a picture of floats is cut down to bytes",
        _SEEN,
        'if found.dtype != wanted.dtype if wanted.dtype == "uint8" else found.dtype.kind not in "fiu":',
        'if found.dtype.kind not in "fiu":',
        (_MISREAD,),
    ),
    Fault(
        "the gripper's camera is sent as the scene's",
        _OPENPI,
        "zip(CAMERAS, obs.images.values(), strict=False)",
        "zip(CAMERAS, reversed(obs.images.values()), strict=False)",
        (f"{_ON_MESSAGES}test_libero_keys_take_the_cameras_in_their_order",),
    ),
    Fault(
        "another version of the harness's protocol is spoken with",
        _MESSAGES,
        "if type(version) is not int or version != PROTOCOL_VERSION:",
        'if "protocol_version" not in payload:',
        (f"{_ON_MESSAGES}test_another_version_of_the_protocol_is_refused",),
    ),
    Fault(
        "a model server is never told that an episode begins",
        _CLIENT,
        "            if request.first or not session.in_episode:",
        "            if False:",
        (_TOLD,),
    ),
    Fault(
        "all environments share one session of a model server",
        _CLIENT,
        "sessions = [self._session(request.session) for request in requests]",
        "sessions = [self._session(0) for request in requests]",
        (_SESSIONS,),
    ),
    Fault(
        "an answer to another message is taken",
        _CLIENT,
        "if message.kind is not wanted or message.seq != self._seq:",
        "if message.kind is not wanted:",
        (f"{_ON_REMOTE}test_a_model_server_that_fails_is_said",),
    ),
    Fault(
        "a served policy decides at every observation",
        _EPISODE,
        "        if not self._chunk:",
        "        if True:",
        (_NEXT,),
    ),
    Fault(
        "a served policy takes every decision for the first",
        _EPISODE,
        "self._served.decide(obs, self._time, self._state, self._generator)",
        "self._served.decide(obs, 0, self._state, self._generator)",
        (_NEXT,),
    ),
    Fault(
        "every served episode draws the same",
        _EPISODE,
        "words = json.dumps([self.seed, task], sort_keys=True)",
        "words = json.dumps([self.seed, sorted(task)], sort_keys=True)",
        (_DRAWN,),
    ),
    Fault(
        "an episode goes on after its end",
        _SERVER,
        "        elif message.kind is Kind.EPISODE_END:",
        "        elif False:",
        (f"{_ON_SERVER}test_an_observation_outside_an_episode_is_an_error",),
    ),
    Fault(
        "a place is never free again",
        "vla_rl/serving/listener.py",
        "            self._places.release()",
        "            pass",
        (f"{_ON_SERVER}test_more_connections_than_allowed_are_refused_until_one_leaves",),
    ),
    Fault(
        "a malformed message leaves the connection open",
        _SERVER,
        'self.connection.close(CloseCode.INVALID_DATA, "malformed message")',
        "continue",
        (f"{_ON_SERVER}test_malformed_messages_end_the_connection_and_no_other",),
    ),
    Fault(
        "a reset of one environment is not noticed",
        _REMOTE,
        "first[torch.as_tensor(env_ids)] = True",
        "first[:] = False",
        (_TOLD, _SESSIONS),
    ),
    Fault(
        "of a chunk everything is executed, whatever the address says",
        _REMOTE,
        "return min(self.address.replan_steps or len(chunk), self.spec.max_chunk)",
        "return min(len(chunk), self.spec.max_chunk)",
        (f"{_ON_REMOTE}test_openpi_every_environment_gets_its_own_chunk",),
    ),
    Fault(
        "a small picture file may be huge",
        _ARRAYS,
        "or height * width > _MAX_PIXELS:",
        "or False:",
        ("tests/serving/test_fields.py::test_a_small_picture_file_is_decoded_up_to_a_size",),
    ),
    Fault(
        "many small picture files may be huge together",
        _ARRAYS,
        "if held > _MAX_ARRAYS:",
        "if False:",
        ("tests/serving/test_fields.py::test_many_small_picture_files_together_are_decoded_up_to_a_size",),
    ),
    Fault(
        "pictures of 16 bits are taken modulo 256",
        _SEEN,
        'if found.dtype != wanted.dtype if wanted.dtype == "uint8" else found.dtype.kind not in "fiu":',
        'if found.dtype.kind not in ("u" if wanted.dtype == "uint8" else "fiu"):',
        ("tests/serving/test_fields.py::test_a_refusal_ends_only_what_cannot_go_on",),
    ),
    Fault(
        "an array for a message's type ends a connection's thread",
        _MESSAGES,
        "if not isinstance(kind, str) or kind not in kinds:",
        "if kind not in kinds:",
        (f"{_ON_FIELDS}[an array]",),
    ),
    Fault(
        "an array for the protocol's version ends a connection's thread",
        _MESSAGES,
        "if type(version) is not int or version != PROTOCOL_VERSION:",
        "if version != PROTOCOL_VERSION:",
        (f"{_ON_FIELDS}[an array]",),
    ),
    Fault(
        "a deep task ends a connection's thread",
        _EPISODE,
        "except (TypeError, ValueError, RecursionError) as error:",
        "except ZeroDivisionError as error:",
        (f"{_ON_FIELDS}[bytes as keys]",),
    ),
    Fault(
        "floats of 0 to 255 are taken for white",
        "vla_rl/serving/openpi_layout.py",
        "if not -_OVERSHOOT <= low <= high <= 1.0 + _OVERSHOOT:",
        "if False:",
        ("tests/serving/test_fields.py::test_floats_that_are_no_brightness_are_refused[255.0]",),
    ),
    Fault(
        "what a request draws does not depend on its pictures",
        "vla_rl/serving/stateless.py",
        "for array in (seen.state, *seen.images.values()):",
        "for array in (seen.state,):",
        ("tests/serving/test_fields.py::test_what_a_request_draws_depends_on_its_pictures",),
    ),
)
