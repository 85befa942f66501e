"""Which engines a grammar is offered, in order. Imports no engine."""

from blockyard.shared.messages import Grammar, GrammarEngine, GrammarKind

AUTO_ORDER = (GrammarEngine.GUIDANCE, GrammarEngine.XGRAMMAR)


def engine_order(grammar: Grammar) -> tuple[GrammarEngine, ...]:
    """Returns the engine that the grammar names, or those that may take it."""
    if grammar.engine != GrammarEngine.AUTO:
        return (grammar.engine,)
    return (GrammarEngine.XGRAMMAR,) if grammar.kind == GrammarKind.STRUCTURAL_TAG else AUTO_ORDER


def engine_behind(grammar: Grammar, name: GrammarEngine) -> GrammarEngine | None:
    """Returns the engine that is asked after this one has refused the grammar, if any."""
    order = engine_order(grammar)
    behind = order.index(name) + 1
    return order[behind] if behind < len(order) else None
