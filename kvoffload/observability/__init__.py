"""Engines and caches as others see them: HTML cards in notebooks, metrics for Prometheus.

notebook       a card for each class; registered when kvoffload is imported
prometheus     a collector for prometheus_client, an optional package
router_events  what a cache holds, as messages that routers read
"""
