"""How hypothesis runs here: the same examples every time, and nothing kept between runs."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "core",
    database=None,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("core")
