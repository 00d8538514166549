"""What a cache needs of tiers below its pool: the interface, and who moves what when."""
