"""From ids to copies, as numpy arrays. Nothing here touches a device."""
