from tests.simulator.machines import config_of, poisson, simulate_small


def test_dp():
    arrivals = poisson(300, 10)
    result = simulate_small(config_of("vllm_dp"), arrivals)
    assert len(result.outcomes) == 300
    assert all(o.output_tokens == a.output_tokens and o.end_s is not None for o, a in zip(result.outcomes, arrivals))
    print(result.end_s, sum(o.ttft_s for o in result.outcomes)/300)
