//! Times as RFC 3339 writes them.

const DAY_SECONDS: i64 = 86_400;

/// The years 0001 to 9999: those of a protobuf `Timestamp`, which files can be set outside of.
const FIRST_MS: i64 = -62_135_596_800_000;
const LAST_MS: i64 = 253_402_300_799_999;

/// A time in UTC, with milliseconds, such as `2026-01-31T12:00:00.000Z`. One outside of the years 0001 to 9999 becomes the
/// nearest of these.
pub fn rfc3339(ms_since_1970: i64) -> String {
    let ms = ms_since_1970.clamp(FIRST_MS, LAST_MS);
    let (seconds, milliseconds) = (ms.div_euclid(1000), ms.rem_euclid(1000));
    let (year, month, day) = date(seconds.div_euclid(DAY_SECONDS));
    let second = seconds.rem_euclid(DAY_SECONDS);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{milliseconds:03}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

/// The milliseconds since 1970 of a time with any offset. `None` if it is none.
pub fn parse_rfc3339(text: &str) -> Option<i64> {
    let (date, rest) = text.split_at_checked(10)?;
    let rest = rest.strip_prefix(['T', 't', ' '])?;
    let (clock, rest) = rest.split_at_checked(8)?;
    let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
    let [hour, minute, second] = numbers(clock, ':', [2, 2, 2])?;
    let is_date = (1..=12).contains(&month) && (1..=31).contains(&day);
    let is_clock = hour < 24 && minute < 60 && second <= 60;
    let (milliseconds, offset) = match rest.strip_prefix('.') {
        None => (0, rest),
        Some(rest) => {
            let end = rest.find(|character: char| !character.is_ascii_digit())?;
            let digits = format!("{:0<3}", rest.get(..end.min(3))?);
            (digits.parse().ok()?, &rest[end..])
        }
    };
    let offset = match offset {
        "Z" | "z" => 0,
        _ => {
            let sign = if offset.starts_with('-') { -1 } else { 1 };
            let [hours, minutes] = numbers(offset.strip_prefix(['+', '-'])?, ':', [2, 2])?;
            sign * (hours * 3600 + minutes * 60)
        }
    };
    if !is_date || !is_clock {
        return None;
    }
    let seconds = days(year, month, day) * DAY_SECONDS + hour * 3600 + minute * 60 + second;
    Some((seconds - offset) * 1000 + milliseconds)
}

/// Numbers of so many digits, with a separator between them.
fn numbers<const N: usize>(text: &str, separator: char, digits: [usize; N]) -> Option<[i64; N]> {
    let mut parts = text.split(separator);
    let mut numbers = [0; N];
    for (number, digits) in numbers.iter_mut().zip(digits) {
        let part = parts.next()?;
        let is_plain = part.len() == digits && part.bytes().all(|byte| byte.is_ascii_digit());
        *number = part.parse().ok().filter(|_| is_plain)?;
    }
    parts.next().is_none().then_some(numbers)
}

/// Days from 1970 to a date of the Gregorian calendar. Years begin in March, so that a leap day is the last one.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// The date so many days after 1970-01-01.
fn date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_123, "2000-02-29T00:00:00.123Z"),
            (1_798_761_599_999, "2026-12-31T23:59:59.999Z"),
            (253_402_300_799_000, "9999-12-31T23:59:59.000Z"),
            (-1, "1969-12-31T23:59:59.999Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(rfc3339(ms), text);
            assert_eq!(parse_rfc3339(text), Some(ms));
        }
        for day in -800_000..800_000 {
            let (year, month, of_month) = date(day);
            assert_eq!(days(year, month, of_month), day);
        }
    }

    #[test]
    fn times_have_years_of_four_digits() {
        let (first, last) = ("0001-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z");
        for (ms, text) in [
            (i64::MIN, first),
            (FIRST_MS - 1, first),
            (FIRST_MS, first),
            (FIRST_MS + 1, "0001-01-01T00:00:00.001Z"),
            (LAST_MS - 1, "9999-12-31T23:59:59.998Z"),
            (LAST_MS, last),
            (LAST_MS + 1, last),
            (100_000_000_000_000_000, last),
            (i64::MAX, last),
        ] {
            assert_eq!(rfc3339(ms), text);
        }
    }

    #[test]
    fn times_come_with_offsets_and_without_fractions() {
        let noon = parse_rfc3339("2026-01-31T12:00:00Z");
        for text in [
            "2026-01-31T13:00:00+01:00",
            "2026-01-31 06:30:00.0-05:30",
            "2026-01-31T12:00:00.0004Z",
        ] {
            assert_eq!(parse_rfc3339(text), noon, "{text}");
        }
        for text in [
            "",
            "2026-01-31",
            "2026-13-31T12:00:00Z",
            "2026-01-31T24:00:00Z",
            "2026-01-31T12:00:00",
            "2026-01-31T12:00:00.Z9",
            "26-01-31T12:00:00Z",
            "2026-01-31T12:00:00+1:00",
        ] {
            assert_eq!(parse_rfc3339(text), None, "{text}");
        }
    }
}
