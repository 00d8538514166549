"""One call that makes a cache: device, layout, engine, index and tiers."""
