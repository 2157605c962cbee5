create table races (winner int not null default pg_backend_pid());
select pg_sleep(0.2);
insert into races default values;
