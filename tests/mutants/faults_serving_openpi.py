"""Faults in what is served to openpi's clients, and in who is let in."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SERVER, _BATCH, _STATELESS, _LAYOUT = (
    f"vla_rl/serving/{name}.py" for name in ("openpi_server", "batching", "stateless", "openpi_layout")
)
_SOCKET, _LISTENER, _ACCESS, _KEY = (
    f"vla_rl/serving/{name}.py" for name in ("websocket", "listener", "access", "api_key")
)
_ON, _ON_ACCESS, _ON_HOSTILE = (f"tests/serving/test_{name}.py::" for name in ("openpi_server", "access", "hostile"))
_SPOILS = f"{_ON}test_a_request_that_the_policy_cannot_take_spoils_no_other"
_CODE = f"{_ON}test_what_is_no_request_ends_the_connection_by_a_code_and_no_other"
_LIMITED = f"{_ON_ACCESS}test_the_limit_is_of_one_address_and_ends_after_a_minute"
_GUARDED = f"{_ON_ACCESS}test_a_request_without_the_key_is_refused_before_anything_is_sent"

FAULTS = (
    Fault(
        "a client that may ask counts as nobody whom a batch waits for",
        _SERVER,
        "        with self.batcher.client():  # before it may ask",
        "        if True:  # before it may ask",
        (f"{_ON}test_a_client_counts_before_it_can_ask",),
    ),
    Fault(
        "a policy that carries a state is asked without it",
        _STATELESS,
        "if state := policy.initial_state(1):",
        "if (state := policy.initial_state(1)) is None:",
        (f"{_ON}test_a_policy_that_carries_a_state_is_refused_in_one_sentence",),
    ),
    Fault(
        "equal seeds draw the same for every request",
        _STATELESS,
        "            digest.update(np.ascontiguousarray(array).data)",
        "            pass",
        (f"{_ON}test_what_a_request_draws_depends_on_it_and_the_seed_and_on_no_other_request",),
    ),
    Fault(
        "actions leave the bounds in openpi's protocol",
        _STATELESS,
        "return np.clip(chunk, self._low, self._high)",
        "return chunk",
        (f"{_ON}test_actions_stay_within_the_bounds_and_the_chunk_that_an_environment_takes",),
    ),
    Fault(
        "every request is computed alone",
        _BATCH,
        "count = min(len(self._waiting), self._batching.size)",
        "count = min(len(self._waiting), 1)",
        (f"{_ON}test_clients_that_ask_together_are_answered_by_one_forward_pass_each_its_own_chunk",),
    ),
    Fault(
        "a batch grows without end",
        _BATCH,
        "count = min(len(self._waiting), self._batching.size)",
        "count = len(self._waiting)",
        (f"{_ON}test_a_batch_has_a_largest_size",),
    ),
    Fault(
        "one request that fails spoils its whole batch",
        _BATCH,
        "                    self._answer([item])",
        "                    item[1].set_exception(error)",
        (_SPOILS,),
    ),
    Fault(
        "pings wait for the policy",
        _SERVER,
        "            connection.attend()",
        "            pass",
        (f"{_ON}test_pings_are_answered_while_the_policy_computes",),
    ),
    Fault(
        "a client that has left is computed for",
        _SERVER,
        "        asked.cancel()",
        "        pass",
        (f"{_ON}test_nothing_is_computed_for_a_client_that_has_left",),
    ),
    Fault(
        "what is no request ends the connection without a code",
        _SERVER,
        "    connection.close(code, why)",
        "    connection.close()",
        (_CODE,),
    ),
    Fault(
        "pictures of another size are refused",
        _SERVER,
        "seen = fitted(self.layout(request), self.served.spec).checked(",
        "seen = self.layout(request).checked(",
        ("tests/cli/test_serve_policy.py::test_openpis_clients_are_served_over_tls_to_whoever_has_the_key",),
    ),
    Fault(
        "pictures are distorted",
        _LAYOUT,
        "share = max(image.shape[0] / height, image.shape[1] / width)",
        "share = min(image.shape[0] / height, image.shape[1] / width)",
        (f"{_ON}test_pictures_are_scaled_without_distortion_and_padded_with_black",),
    ),
    Fault(
        "pictures of floats wrap around",
        _LAYOUT,
        "        if not np.isfinite(array).all():",
        "        if False:",
        (f"{_ON_HOSTILE}test_pictures_of_any_numbers_are_fitted_or_refused",),
    ),
    Fault(
        "a client that sends on and on is read while the policy computes",
        _SOCKET,
        "        if not self._events:",
        "        if True:",
        ("tests/serving/test_websocket.py::test_what_comes_while_a_server_computes_stays_in_the_connection",),
    ),
    Fault(
        "other machines are served without a key",
        _ACCESS,
        "if not is_loopback(host) and not (certificate and key):",
        "if not is_loopback(host) and not certificate:",
        (f"{_ON_ACCESS}test_other_machines_are_served_with_tls_and_a_key_alone",),
    ),
    Fault(
        "any key opens the server",
        _ACCESS,
        "if self._key.matches(header):",
        "if header:",
        (_GUARDED,),
    ),
    Fault(
        "the server does not ask for the key",
        _LISTENER,
        "self.pages, partial(self.access.refusal, host))",
        "self.pages)",
        (_GUARDED,),
    ),
    Fault(
        "wrong keys may be tried without end",
        _ACCESS,
        "            if len(wrong) >= _WRONG:",
        "            if False:",
        (_LIMITED, f"{_ON_ACCESS}test_wrong_keys_are_limited_per_address_and_open_connections_stay_open"),
    ),
    Fault(
        "an address that sent wrong keys is refused for ever",
        _ACCESS,
        "while wrong and wrong[0] <= now - _WINDOW_S:",
        "while False:",
        (_LIMITED,),
    ),
    Fault(
        "strangers fill the memory with their addresses",
        _ACCESS,
        "if len(self._wrong) > _ADDRESSES:",
        "if False:",
        (f"{_ON_ACCESS}test_what_is_remembered_of_strangers_is_bounded",),
    ),
    Fault(
        "the frames' own log has the key",
        _SOCKET,
        "_frames.setLevel(logging.WARNING)",
        "_frames.setLevel(logging.NOTSET)",
        (f"{_ON_ACCESS}test_no_log_has_the_key_or_a_wrong_one",),
    ),
    Fault(
        "the key is printed with its object",
        _KEY,
        "_text: str = field(repr=False)",
        "_text: str = field(repr=True)",
        (f"{_ON_ACCESS}test_a_key_is_read_from_a_file_or_the_environment_and_is_never_printed",),
    ),
    Fault(
        "our client sends the key where anybody can read it",
        _SOCKET,
        "if key and not uri.secure and not is_loopback(uri.host):",
        "if False:",
        (f"{_ON_ACCESS}test_a_key_is_not_sent_where_it_could_be_read",),
    ),
    Fault(
        "who is silent takes every place",
        _LISTENER,
        "strangers = self._opening[client_address[0]] >= self._most_opening",
        "strangers = False",
        (f"{_ON_ACCESS}test_one_address_takes_a_quarter_of_the_places_while_it_says_nothing",),
    ),
)
