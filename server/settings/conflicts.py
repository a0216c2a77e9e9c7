"""The table of conflicting server settings; engine/settings/conflicts.py has the engine's."""

import re

from engine.settings.peer import Peer, is_peer
from engine.settings.setting import Conflict
from engine.text.types import RESERVED

_ROOT_PATH = re.compile(r"(/[\w.~-]+)+/?")


# `c` is the Settings.
CONFLICTS = (
    Conflict(
        lambda c: c.models and (c.model or c.served_model_name),
        "--models does not go with one MODEL or --served-model-name; give an item of --models its served-model-name.",
    ),
    Conflict(
        lambda c: c.models and (c.role != "both" or c.record or c.kv_events_config or c.tensor_parallel_size > 1),
        "--models does not go with --kv-transfer-config, --record, --kv-events-config or --tensor-parallel-size; serve such "
        "a model alone.",
    ),
    Conflict(
        lambda c: c.role != "prefill" and (c.kv_connector_listen or c.kv_connector_host),
        "--kv-transfer-config: listen and host are for the role prefill, and role is {c.role!r}; leave them out.",
    ),
    Conflict(
        lambda c: c.role != "decode" and c.kv_connector_peers,
        "--kv-transfer-config: peers are for the role decode, and role is {c.role!r}; leave them out.",
    ),
    Conflict(
        lambda c: not all(is_peer(each) for each in (*c.kv_connector_peers, c.kv_connector_listen or "a:1")),
        "--kv-transfer-config: listen is {c.kv_connector_listen!r} and peers are {c.kv_connector_peers!r}; each address must "
        "be like 10.0.0.5:5600.",
    ),
    Conflict(
        lambda c: (
            c.kv_connector_listen and Peer.parse(c.kv_connector_listen).is_unspecified and not c.kv_connector_host
        ),
        "--kv-transfer-config: listen is {c.kv_connector_listen!r}, every address of this machine; name the one that decode "
        "daemons reach as host.",
    ),
    Conflict(
        lambda c: (
            c.kv_connector_listen
            and not Peer.parse(c.kv_connector_listen).is_loopback
            and not (c.api_key or c.kv_connector_key)
        ),
        "--kv-transfer-config: listen is {c.kv_connector_listen!r}, which other machines reach; set key, or --api-key.",
    ),
    Conflict(
        lambda c: c.role == "decode" and c.swap_space,
        "--kv-transfer-config: role decode does not go with --swap-space; leave one of them out.",
    ),
    Conflict(
        lambda c: c.role == "decode" and (c.kv_offload_gib or c.kv_offload_dir),
        "--kv-transfer-config: role decode does not go with --kv-offload-config; leave one of them out.",
    ),
    Conflict(
        lambda c: c.role == "decode" and c.record,
        "--kv-transfer-config: role decode does not go with --record; leave one of them out.",
    ),
    Conflict(
        lambda c: c.role != "both" and not c.enable_prefix_caching,
        "--kv-transfer-config: role {c.role} hands blocks over through the prefix cache; leave --enable-prefix-caching on.",
    ),
    Conflict(
        lambda c: c.role != "both" and c.tensor_parallel_size > 1,
        "--kv-transfer-config hands over the K/V of one device, and --tensor-parallel-size is {c.tensor_parallel_size}; leave "
        "one of them out.",
    ),
    Conflict(
        lambda c: c.protect_metrics and not (c.api_key or c.tenants),
        "--protect-metrics needs a key to ask for; set --api-key or --tenants, too.",
    ),
    Conflict(
        lambda c: not c.ssl_certfile and (c.ssl_keyfile or c.ssl_ca_certs or c.ssl_cert_reqs),
        "--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need a certificate; set --ssl-certfile, too.",
    ),
    Conflict(
        lambda c: c.ssl_cert_reqs and not c.ssl_ca_certs,
        "--ssl-cert-reqs is {c.ssl_cert_reqs}, which needs authorities to check by; set --ssl-ca-certs, too.",
    ),
    Conflict(
        lambda c: c.root_path and not _ROOT_PATH.fullmatch(c.root_path),
        "--root-path is {c.root_path!r}; it must be like /quire.",
    ),
    Conflict(
        lambda c: RESERVED & (c.default_chat_template_kwargs or {}).keys(),
        "--default-chat-template-kwargs may not set messages, tools or add_generation_prompt; leave them out.",
    ),
)
