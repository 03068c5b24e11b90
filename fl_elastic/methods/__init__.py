"""Published methods: one folder each with policy, layers and costs, loaded when one of its names is used.

The `__init__` of a folder lists the names that it adds and the modules that register them, as ``policies``,
``importances``, ``channel_scores`` or ``operations``. No other code refers to the folder.
"""
