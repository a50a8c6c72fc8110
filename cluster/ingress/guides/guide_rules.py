"""vLLM's checks of what guides an answer, without the compiling: what is left takes microseconds on the event loop."""

import json
from typing import Any

from pengserve.cluster.ingress.vllm_openai_seam import (
    VLLMValidationError,
    backend_xgrammar,
    check_json_nesting,
    choice_as_grammar,
    has_xgrammar_unsupported_json_features,
)


def parse_without_compiling() -> None:
    """Puts `check_guide` in the place of vLLM's function of the same use, for this process.

    vLLM looks the function up at each call, on the event loop: when it reads a body with a structural tag, and when it
    takes a guided request in.
    """
    backend_xgrammar.validate_xgrammar_grammar = check_guide


def check_guide(sampling_params: Any) -> None:
    """`validate_xgrammar_grammar` of vLLM but for what `guide_check.py` does elsewhere.

    Raises:
        VLLMValidationError: it is no JSON, or asks for what xgrammar would ignore.
    """
    guide = sampling_params.structured_outputs
    if guide is None:
        return
    if guide.choice:
        guide.grammar, guide.choice = choice_as_grammar(guide.choice), None
    elif guide.json:
        check_json_nesting(guide.json)
        is_text = isinstance(guide.json, str)
        schema = _object(guide.json, "Invalid JSON grammar specification.") if is_text else guide.json
        if has_xgrammar_unsupported_json_features(schema):
            raise VLLMValidationError("The provided JSON schema contains features not supported by xgrammar.")
    elif guide.structural_tag:
        check_json_nesting(guide.structural_tag, structural_tag=True)
        tag = _object(guide.structural_tag, "Invalid structural tag specification.")
        if not isinstance(tag, dict):
            raise VLLMValidationError("Invalid structural tag specification.")


def _object(text: Any, complaint: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        raise VLLMValidationError(complaint) from None
