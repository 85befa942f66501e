"""The optional package nixl by either of its names. Only `nixl_agent.nixl_package` imports this module."""

try:
    import nixl_cu13 as package
except ModuleNotFoundError:
    import nixl as package

__all__ = ["package"]
