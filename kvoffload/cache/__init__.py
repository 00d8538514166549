"""A prefix cache: keys to slots of an engine. Below `BlockCache` nothing here touches a device or bytes."""
