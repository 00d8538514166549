"""Engines and caches shown to others: HTML cards in notebooks, metrics for Prometheus, events for routers.

notebook       a card for each class; registered when kvoffload is imported
prometheus     a collector for prometheus_client, an optional package
router_events  the keys of a cache, as messages that routers read
"""
