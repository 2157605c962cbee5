-- +goose Up
create table races (winner int not null default pg_backend_pid(), slept text default pg_sleep(0.2)::text);
insert into races default values;
-- +goose Down
drop table races;
