"""The interface as a stranger meets it: described by OpenAPI 3.1, and held against that description with hundreds of odd requests.

With thousands, others each time: `pytest tests/datasetserver/test_openapi.py --hypothesis-profile=deep --hypothesis-seed=1 -s`.
"""

import json
from collections import Counter

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks

from datasetserver.app import ENDPOINTS
from swarm.protocol import ErrorAnswer
from tests.datasetserver.hosting import Host
from tests.datasetserver.test_http import call, envelope, signed
from tests.identities import id_of

CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.unsupported_method,
]

EXAMPLES = {GenerationMode.POSITIVE: 32, GenerationMode.NEGATIVE: 16}
"""Of 40 each, the last kind of answer that was new to an endpoint came with the 29th and the 8th."""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = Host(tmp_path_factory.mktemp("described"), samples=8).start()
    yield host
    assert host.stop() == 0


@pytest.fixture(scope="module")
def description(host):
    described = schemathesis.openapi.from_dict(json.loads(call(host, "/v1/openapi.json")[2]))
    described.config.generation.codec = None  # all but surrogates; with "utf-8" Hypothesis tries each of 1.1 million characters, 3 s
    return described


@pytest.fixture(scope="module")
def run_id(host):
    return envelope(host)["run_id"]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_no_request_makes_the_server_err_or_answer_what_it_does_not_describe(host, description, run_id, endpoint, mode):
    operation = description[endpoint.path][endpoint.method]
    if mode is GenerationMode.NEGATIVE and not (endpoint.asks or "{" in endpoint.path):
        pytest.skip("nothing in it can be wrong")
    if endpoint.answers == "text/event-stream":
        pytest.skip("it never ends; tests/page reads it")

    deep = settings.get_current_profile_name() == "deep"
    statuses = Counter()

    @settings(max_examples=400 if deep else EXAMPLES[mode], derandomize=not deep, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        headers = {}
        if isinstance(case.body, dict) and "run_id" in case.body and mode is GenerationMode.POSITIVE:
            case.body |= {"run_id": run_id, "peer": id_of("schemathesis")}  # so that it gets past the first checks
            sent = requests.Request(**case.as_transport_kwargs(base_url=host.url)).prepare()
            headers = signed(sent.path_url, sent.body, sent.method)
        response = case.call(base_url=host.url, headers=headers)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400:
            ErrorAnswer.model_validate_json(response.content)

    ask()
    print(f"{endpoint.method} {endpoint.path} {mode.value}: {dict(sorted(statuses.items()))}")


def test_every_endpoint_is_described_with_the_models_that_parse_it(host):
    described = json.loads(call(host, "/v1/openapi.json")[2])
    assert described["openapi"] == "3.1.0"
    for endpoint in ENDPOINTS:
        operation = described["paths"][endpoint.path][endpoint.method.lower()]
        if endpoint.asks:
            name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            assert name == endpoint.asks.__name__
            assert set(described["components"]["schemas"][name]["properties"]) == set(endpoint.asks.model_fields)
            assert described["components"]["schemas"][name]["additionalProperties"] is False
