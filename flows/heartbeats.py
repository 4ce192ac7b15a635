"""Time for runs to be heard again, before a server that was away calls them dead.

The server keeps, for each run, the time at which it would be Crashed if it were not heard until then. While the server
is away nobody is heard, and the times pass: at its start it would call every run Crashed that goes on in good health
(Prefect 3.9). So they are put off here, with the server's own models, before it starts.
"""

from datetime import UTC, datetime, timedelta

import sqlalchemy as sa
from prefect.server.database import provide_database_interface


async def give_time_to_report(automation: str, within: timedelta) -> int:
    """Every run that the automation watches has `within` from now on. Returns how many; 0 without a database."""
    db = provide_database_interface()
    until = datetime.now(UTC) + within
    watched = sa.select(db.Automation.id).where(db.Automation.name == automation)
    late = sa.and_(db.AutomationBucket.automation_id.in_(watched), db.AutomationBucket.end < until)
    try:
        async with db.session_context(begin_transaction=True) as session:
            found = await session.execute(sa.update(db.AutomationBucket).where(late).values(end=until))
            return found.rowcount
    except (sa.exc.OperationalError, sa.exc.ProgrammingError):
        return 0  # no such table
