"""What every floor may use: checks of arguments, names of types, files in the cache folder, facts about the host."""
